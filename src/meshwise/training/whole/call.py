"""Run a model's calls on each rank's rows, or operator by operator.

    apart      the model gets plain tensors with this rank's rows. It was proven that no row of its output depends on
               another row (proof.py). This is proven again at some calls, and where a call differs from the proven one.
    through    the model gets split tensors: each operator runs by its rule, or on the whole. Always exact. The model's
               own submodules may then run apart.

Inside a call that runs apart, a gradient covers only this rank's part (parallel/splits/crossing.py), so it is not
scaled on its way.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import zlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from meshwise.parallel.splits.axis import SplitPart
from meshwise.parallel.splits.crossing import enter
from meshwise.parallel.splits.hooks import is_of_program
from meshwise.parallel.splits.rows_axis import DataAxis
from meshwise.parallel.splits.tensor import SplitTensor, check_copies, split
from meshwise.spec.errors import UsageError
from meshwise.spec.user_code import user_place
from meshwise.torch_compat.beside_dispatch import transforming
from meshwise.torch_compat.compiling import is_used, without_compiling
from meshwise.torch_compat.modules import buffers_in, parameters_in
from meshwise.torch_compat.reducer import data_of, in_backward, versions
from meshwise.torch_compat.sharding import sharded_modules
from meshwise.torch_compat.torch_function import on_parts
from meshwise.torch_compat.tree import all_leaves, map_tensors
from meshwise.training.autograd.loss_graph import next_node
from meshwise.training.data.order import BatchSlice
from meshwise.training.engine.engine import Engine
from meshwise.training.engine.seeds import seed_generators, set_states, states
from meshwise.training.whole.batches import with_rows, write_back
from meshwise.training.whole.new_code import HEARS, listen, look_again, new_code
from meshwise.training.whole.proof import Verdict, holds_values, outputs, prove
from meshwise.training.whole.reads import Otherwise, Reads, apart, looked_at, registered
from meshwise.transfer import collectives
from meshwise.transfer.splitmix import mixed

AGAIN = 64
"""A proven call runs operator by operator at its 2nd, 4th, 8th … 64th time, and at every 64th after that."""
OURS = ("forward", "__deepcopy__", "__getstate__")  # attributes that `divide` sets on a module
KINDS = 16  # a call no longer runs apart once its graph has had this many different numbers of autograd nodes
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class Divided:
    """How the calls of a program's models are divided over the ranks of `axis`."""

    def __init__(self, engine: Engine, axis: DataAxis) -> None:
        self.engine, self.axis, self.exact = engine, axis, engine.draws is not None
        self.key: tuple[int, ...] | None = None  # the key from which draws in the newest batch are seeded
        self._drawn: tuple[Any, int] = (None, 0)  # the key of the newest draws, and how many calls had this key
        self.verdicts: dict[str, Verdict] = {}
        """The newest verdicts, by the class of the module and the line that called it first."""
        self.alone = axis.size == collectives.world_size(collectives.everyone())
        listen()

    @contextlib.contextmanager
    def drawing(self) -> Iterator[None]:
        """Let a call draw from this rank's own random stream, so that the loop still draws the same numbers on all
        ranks."""
        device = self.engine.world.device
        before = states(device)
        # Without a loader, take a key from the generator's state, so that a resumed run draws the same numbers.
        key = self.key or (zlib.crc32(before[0].numpy().tobytes()),)
        self._drawn = key, self._drawn[1] + 1 if self._drawn[0] == key else 1
        seed_generators(device, mixed(*key, self._drawn[1], self.axis.rank))
        try:
            yield
        finally:
            set_states(device, before)


class Call:
    """Replaces a module's forward, and takes split tensors. own: whether the module's gradients are averaged."""

    def __init__(self, module: nn.Module, divided: Divided, own: bool = True) -> None:
        self.module, self.inner, self.divided, self.own = module, module.forward, divided, own
        self.kind = divided.engine.world.kind
        self.known: dict[Any, Verdict] = {}
        self.opened, self.place = False, ""
        self._look()

    def _look(self) -> None:
        """Collect the submodules with their parameters and hooks. A program may add some at any time."""
        self._registered = registered[0]
        self._modules = list(self.module.modules())
        self._alone = self.divided.alone and not any(sharded_modules(self.module))
        looked_at.update(self._modules)
        self._parameters = [held for m in self._modules if (held := parameters_in(m))]
        self._hooks: list[Any] = [getattr(m, name) for m in self._modules for name in HOOKS]

    def copied(self, memo: dict[int, Any]) -> nn.Module:
        """Return a deep copy of the module, whose gradients are not averaged."""
        attributes = vars(self.module)
        own = {name: attributes.pop(name) for name in OURS}
        try:
            made = copy.deepcopy(self.module, memo)
        finally:
            attributes.update(own)
        divide(made, self.divided, own=False)
        return made

    def state(self) -> Any:
        """Return the module's state for pickling, without the attributes in OURS."""
        state = type(self.module).__getstate__(self.module)
        return {k: v for k, v in state.items() if k not in OURS} if isinstance(state, dict) else state

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        alone = not kwargs and len(args) == 1 and type(args[0]) is SplitTensor
        leaves = args if alone else [*all_leaves((args, kwargs))]
        part = next((each.parts[0] for each in leaves if isinstance(each, SplitTensor) and 0 in each.parts), None)
        if part is None or part.axis.proves or transforming or in_backward():
            return self.inner(*args, **kwargs)
        for each in leaves:
            if isinstance(each, SplitTensor):
                check_copies(each)
        if self._registered != registered[0]:
            self._look()
            self.known, self.opened = {}, False
        divided: list[tuple[Tensor, Tensor, int]] = []
        if not alone:
            args, kwargs = map_tensors(lambda leaf: with_rows(leaf, part, divided), (args, kwargs))
            leaves = [*all_leaves((args, kwargs))]
        made = self._called(leaves, args, kwargs, part)
        write_back(divided)
        return made

    def _called(self, leaves: Any, args: Any, kwargs: Any, part: SplitPart) -> Any:
        with on_parts():
            kind = self._kind(leaves, kwargs, part)
        if isinstance(kind, str):
            verdict = Verdict(why=kind)
        else:
            verdict = self.known.get(kind) or self.known.setdefault(kind, self._proven(args, kwargs))
        if verdict.dims is None or not self._is_own():
            return self._through(args, kwargs)
        calls = verdict.calls = verdict.calls + 1
        if calls % AGAIN == 0 or (1 < calls < AGAIN and calls & (calls - 1) == 0):
            return self._again(args, kwargs, verdict, part)
        return self._apart(args, kwargs, verdict, part)

    def _is_own(self) -> bool:
        """Return whether the module's gradients are averaged, or need not be."""
        return not torch.is_grad_enabled() or (
            self.own and self.divided.axis.averages_all([p for held in self._parameters for p in held.values()])
        )

    def _kind(self, leaves: Any, kwargs: Any, part: SplitPart) -> Any:
        """Return the key of calls that share a proof, or why a call cannot run apart."""
        key: list[Any] = [self.module.training, torch.is_grad_enabled(), torch.is_autocast_enabled(self.kind), *kwargs]
        held = _held(part)
        usable = part.repeats == 1 and all(held)
        for leaf in leaves:
            if isinstance(leaf, SplitTensor):
                own = leaf.parts.get(0)
                alone = own is not None and len(leaf.parts) == 1 and (own is part or own.alike(part))
                usable = usable and alone
                key.append((leaf.dim(), leaf.dtype, own.dim if own is not None else -1))
            else:
                usable = usable and not holds_values(leaf)
                sign = leaf if isinstance(leaf, bool | str) else type(leaf)
                key.append(leaf.shape if isinstance(leaf, Tensor) else sign)
        if not usable:
            return "a rank has no row, or an argument is an object that may keep tensors"
        return (*key, sum(map(len, self._hooks)), *(rows == 1 for rows in held))  # torch may special-case a single row

    def _proven(self, args: Any, kwargs: Any) -> Verdict:
        axis = self.divided.axis
        if any(is_of_program(hook) for held in self._hooks for hook in held.values()):
            verdict = Verdict(why="has hooks of the program")
        else:
            verdict = prove(self.module, self.inner, args, kwargs, self.divided.engine, axis.agreed)
        if verdict.draws and self.divided.exact:
            verdict = Verdict(why="draws the numbers of one device")
        every = collectives.gather_objects((verdict.dims, verdict.why), axis.group)
        if verdict.dims is not None and any(dims != verdict.dims for dims, _ in every):
            verdict = Verdict(why=next((why for _, why in every if why), "differs between ranks"))
        self.place = self.place or user_place()
        self.divided.verdicts[f"{type(self.module).__name__} ({self.place})"] = verdict
        return verdict

    def _through(self, args: Any, kwargs: Any) -> Any:
        if not self.opened:
            self.opened = True
            for child in self.module.children():
                divide(child, self.divided, self.own)
        return self._run_through(args, kwargs)

    def _again(self, args: Any, kwargs: Any, verdict: Verdict, part: SplitPart) -> Any:
        """Run a proven call operator by operator, and check that it still keeps rows apart."""
        found: list[str] = []
        if verdict.answers or verdict.draws:
            found += filter(None, [self._proven(args, kwargs).why])
        # Operator by operator, the call would draw other numbers, but a resumed run may not check this call.
        if verdict.draws and not found:
            return self._apart(args, kwargs, verdict, part)
        written, crossing = verdict.attributes(), self.divided.axis.watched(None if verdict.answers else found)
        with crossing, self._hearing() as new:
            made = self._run_through(args, kwargs)
        if found:
            verdict.dims, verdict.why = None, found[0]
            raise UsageError(
                f"{type(self.module).__name__} has begun to mix the rows of a batch, at {found[0]}: its call number "
                f"{verdict.calls} needs all rows. Earlier calls, which ran on each rank's rows, may have needed them. "
                "Let the model mix rows from its first call on, or use one device."
            )
        if new:
            self._proven_anew(args, kwargs, verdict, written, new)
        return made

    def _run_through(self, args: Any, kwargs: Any) -> Any:
        with without_compiling() if is_used() else contextlib.nullcontext():
            return self.inner(*args, **kwargs)

    def _apart(self, args: Any, kwargs: Any, verdict: Verdict, part: SplitPart) -> Any:
        engine, grad = self.divided.engine, torch.is_grad_enabled()
        begun, nodes, outside = next_node() if grad else 0, -1, [False]
        why: Any = None
        before, written, forget = self._versions(), verdict.attributes(), engine.attempt(part)
        with on_parts():
            own_args, own_kwargs = _own(args, kwargs, part, outside)
        of_loop = engine.part
        if engine.program.coupled_gradients:
            engine.part = BatchSlice(torch.empty(0), part.own, part.length)
        apart.reads = None if is_used() and not verdict.answers else Reads(verdict, self.divided.axis)
        try:
            with self.divided.drawing() if verdict.draws else contextlib.nullcontext(), self._hearing() as new:
                made = self.inner(*own_args, **own_kwargs)
            nodes, again = next_node() - begun, False
            if new:
                apart.reads = None
                why, again = self._proven_anew(args, kwargs, verdict, written, new)
            # Another number of nodes shows that the call has changed, except with torch.compile, which adds nodes.
            if grad and why is None and nodes not in verdict.nodes and not is_used():
                why = "another number of operators" if verdict.nodes and not again else None
                verdict.nodes |= set() if why else {nodes}
        except Otherwise as other:
            why = other.args[0]
        finally:
            apart.reads, engine.part = None, of_loop
        if why is not None:
            forget()
            verdict.set_attributes(written)
            self._check_unwritten(before, why)
            if isinstance(why, str):
                return self._otherwise(args, kwargs, verdict, why, nodes)
            return self._answered(args, kwargs, verdict, why, part)
        tensors = [made] if isinstance(made, Tensor) else [each for each in outputs(made) if isinstance(each, Tensor)]
        for tensor, dim in zip(tensors, verdict.dims or (), strict=True):
            if dim >= 0 and not isinstance(tensor, SplitTensor):
                split(tensor, part if dim == part.dim else replace(part, dim=dim))
                if not outside[0]:
                    tensor.of_call = True  # type: ignore[attr-defined]
        return made

    def _hearing(self) -> contextlib.AbstractContextManager[Any]:
        """Notice new code in a call, unless proofs are collective: new code may run on one rank only."""
        listens = HEARS and self._alone and not self.divided.engine.program.coupled_gradients and not is_used()
        return new_code() if listens else contextlib.nullcontext()

    def _proven_anew(self, args: Any, kwargs: Any, verdict: Verdict, before: Any, new: Any) -> tuple[str | None, bool]:
        """Return why a call that ran new code cannot run apart, and whether its proof has run all of this code."""
        device = self.divided.engine.world.device
        again = functools.partial(prove, self.module, self.inner, args, kwargs, self.divided.engine)
        why, repeated = look_again(new, verdict, before, again, device)
        if verdict.draws and self.divided.exact:
            why = "draws the numbers of one device"
        if why:  # the verb log records the all_reduce below, so it can report a rank that comes here alone
            verdict.dims, verdict.why = None, why
            self.divided.axis.all_reduce(torch.zeros(1, device=device))
        return why, repeated

    def _answered(self, args: Any, kwargs: Any, verdict: Verdict, answers: Any, part: SplitPart) -> Any:
        """Prove and rerun a call whose questions about all rows got other answers than in its earlier proof."""
        other = verdict.others.get(answers) or verdict.others.setdefault(answers, self._proven(args, kwargs))
        return self._through(args, kwargs) if other.dims is None else self._apart(args, kwargs, other, part)

    def _versions(self) -> list[int]:
        return versions(b for m in self._modules for b in buffers_in(m).values() if b is not None)

    def _check_unwritten(self, before: list[int], why: Any) -> None:
        if before != self._versions():
            raise UsageError(
                f"{type(self.module).__name__} no longer computes what it did when it was proven to keep the rows of a "
                f"batch apart: {why}. It has written to its buffers, so the call cannot run again. Use one device, or "
                'mw.distribute(…, view="rank").'
            )

    def _otherwise(self, args: Any, kwargs: Any, verdict: Verdict, why: str, nodes: int) -> Any:
        """Rerun a call that differs from its proof, operator by operator. Keep the proof if no row needs another
        row."""
        found: list[str] = []
        with self.divided.axis.watched(found):
            made = self._run_through(args, kwargs)
        if found or nodes < 0 or len(verdict.nodes) >= KINDS:
            verdict.dims, verdict.why = None, found[0] if found else why
        verdict.nodes.add(nodes)
        return made


@functools.lru_cache(64)
def _held(part: SplitPart) -> tuple[int, ...]:
    return tuple(map(part.held, range(part.axis.size)))


def _own(args: Any, kwargs: Any, part: SplitPart, outside: list[bool]) -> Any:
    def own(leaf: Tensor) -> Tensor:
        outside[0] |= leaf.requires_grad
        if isinstance(leaf, SplitTensor):
            rows = leaf.as_subclass(Tensor) if leaf.requires_grad else data_of(leaf)
            # Clone the rows, because dynamo would also see the SplitTensor that they are a view of.
            return rows.clone() if leaf.requires_grad and is_used() else rows
        return enter(leaf, part.axis)

    if len(args) == 1 and not kwargs and type(args[0]) is SplitTensor:
        return (own(args[0]),), kwargs
    return map_tensors(own, (args, kwargs))


def divide(module: nn.Module, divided: Divided, own: bool = True) -> None:
    """Let the calls of a module that has submodules run apart, on each rank's rows, where they can."""
    if isinstance(module, (nn.ModuleList, nn.ModuleDict)):
        for child in module.children():
            divide(child, divided, own)
    elif next(module.children(), None) is not None and not isinstance(vars(module).get("forward"), Call):
        module.forward = call = Call(module, divided, own)
        vars(module).update(__deepcopy__=call.copied, __getstate__=call.state)
