"""Decide which blocks and other modules each pipeline stage holds.

A stage holds its blocks, and the modules outside of blocks that it uses.

During the first step, all ranks hold all modules outside of blocks. The gradients of that step then decide. A parameter
stays on the stages where it got a gradient. On other stages it becomes NaN and takes no memory. If several stages hold
a parameter (tied weights), its gradients are summed over these stages. A buffer belongs to the first stage in whose
layers its module ran.

Under shard, what a stage holds is divided over the ranks of the stage. Under tensor, modules outside of the blocks are
split before stages drop them.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from meshwise.parallel.step_hooks import held_parameters
from meshwise.spec.errors import PlanError
from meshwise.torch_compat import sharding
from meshwise.torch_compat.dispatch import rehearsing
from meshwise.torch_compat.modules import parameters_in
from meshwise.torch_compat.reducer import versions
from meshwise.torch_compat.sharding import hashes_of, local_of
from meshwise.transfer import collectives, stages
from meshwise.transfer.reading import together
from meshwise.transfer.sharded import full_tensor
from meshwise.transfer.stages import Pipe

_absent = WeakIdKeyDictionary()  # parameters whose values are on other stages


class Holding:
    """Decides which modules of a pipeline's model this rank holds, and frees the parameters of all other modules."""

    def __init__(self, model: nn.Module, pipe: Pipe, blocks: Sequence[nn.Module], own: Sequence[nn.Module]) -> None:
        self._model, self._pipe = weakref.ref(model), pipe
        self.decided = False
        """Whether it has been decided, after the first step, which stages hold the modules outside of the blocks."""
        self.reached: set[int] = set()
        """The ids of the parameters that got a gradient in the backwards of the first step."""
        self._live_modules: set[str] = set()
        self._trained: tuple[bool, ...] = ()
        self._shared: list[tuple[str, collectives.Group]] = []
        self._owned: set[str] = set()  # names of parameters that this rank counts in norms if several ranks hold them
        self.let_go_parts: Callable[[set[str]], list[Any]] | None = None
        """Frees this rank's shards of the named parameters (see `Setup.let_go`). None if parameters are not sharded."""
        self._seen: list[tuple[nn.Module, str, nn.Parameter, nn.Parameter]] = []
        self._hold(blocks, own)

    @property
    def model(self) -> nn.Module:
        """The model that the stages of the pipeline divide."""
        model = self._model()
        assert model is not None
        return model

    def _hold(self, blocks: Sequence[nn.Module], own: Sequence[nn.Module]) -> None:
        others = [block for block in blocks if not any(block is mine for mine in own)]
        inside = {id(part) for block in others for part in block.modules()}
        kept = {
            id(p) for name, m in self.model.named_modules() if id(m) not in inside for p in m.parameters(recurse=False)
        }
        names = {name for name, p in self.model.named_parameters(remove_duplicate=False) if id(p) not in kept}
        _drop(self.model, names, self._pipe.rank)
        buffers = {
            f"{name}.{key}"
            for name, m in self.model.named_modules(remove_duplicate=False)
            if id(m) in inside
            for key, _ in m.named_buffers(recurse=False)
        }
        stages.now_lacks(self.model, names | buffers)
        outside = {id(m) for block in blocks for m in block.modules()}
        for name, module in self.model.named_modules():
            module.register_load_state_dict_pre_hook(_before_load)
            module.register_load_state_dict_post_hook(_after_load)
            if id(module) not in outside and any(True for _ in module.buffers(recurse=False)):
                module.register_forward_pre_hook(_Notes(self._live_modules, name))

    def let_go_again(self) -> None:
        """Drop the parameters of other stages a second time, because filling a deferred model has given them memory
        again."""
        _drop(self.model, stages.lacks(self.model), self._pipe.rank)

    def show(self, seen: bool) -> None:
        """If `seen`, put NaN tensors in place of parameters that only other stages need. Else put these back."""
        for module, name, held, shown in self._seen:
            parameters_in(module)[name] = shown if seen else held

    def _reached_by_name(self) -> set[str]:
        made: dict[int, nn.Parameter] = {}
        for _, module in sharding.sharded_modules(self.model):
            for group in sharding.groups_of(module):
                made |= group.made_from()
        reached = self.reached | {id(made[key]) for key in self.reached if key in made}
        return {name for name, p in self.model.named_parameters() if id(p) in reached}

    def decide(self) -> None:
        """Decide which stages hold the parameters that belong to no block."""
        model, own = self.model, self._pipe.rank
        named = dict(model.named_parameters())
        lacking = stages.lacks(model)
        mine = self._reached_by_name(), set(self._live_modules), set(lacking)
        ranks: list[tuple[set[str], set[str], set[str]]] = [(set(), set(), set()) for _ in range(self._pipe.size)]
        for rank, facts in collectives.gather_from_all((own, mine)):
            for known, more in zip(ranks[rank], facts, strict=True):
                known |= more
        drop: set[str] = set()
        groups: dict[tuple[int, ...], list[str]] = {}
        for name, p in named.items():
            holders = tuple(rank for rank, (reached, _, _) in enumerate(ranks) if name in reached)
            if len(holders) > 1:
                groups.setdefault(holders, []).append(name)
            if p.requires_grad and name not in lacking:
                able = [rank for rank, (_, _, lacks) in enumerate(ranks) if name not in lacks]
                if own not in (holders or able[-1:]):
                    drop.add(name)
            if own == (holders or (0,))[0]:
                self._owned.add(name)
        same = {name for name, p in model.named_parameters(remove_duplicate=False) if any(p is named[n] for n in drop)}
        for held, places, shown in self.let_go_parts(same) if self.let_go_parts is not None else ():
            shown.register_post_accumulate_grad_hook(functools.partial(_refuse, places[0][1], own))
            self._seen += [(module, name, held, shown) for module, name in places]
        _drop(model, same, own)
        stages.now_lacks(model, lacking | same | self._buffers_of_others([live for _, live, _ in ranks]))
        every = collectives.gather_from_all(sorted(groups))
        pipes = sorted(set(collectives.gather_from_all(collectives.ranks_of(self._pipe.group))))
        for holders in sorted({h for each in every for h in each}):
            for ranks_of_pipe in pipes:
                group = collectives.group_of([ranks_of_pipe[rank] for rank in holders])
                if ranks_of_pipe == collectives.ranks_of(self._pipe.group) and own in holders:
                    self._shared += [(name, group) for name in groups.get(holders, ())]
        self._trained = tuple(p.requires_grad for p in model.parameters())
        self.decided = True

    def _buffers_of_others(self, live: Sequence[set[str]]) -> set[str]:
        """Return the names of buffers that only other stages need: the buffers of modules that ran on other ranks of
        the pipeline, but not on this rank."""
        found = set()
        for name in set().union(*live) - live[self._pipe.rank]:
            module = self.model.get_submodule(name)
            found |= {f"{name}.{key}" if name else key for key, _ in module.named_buffers(recurse=False)}
        return found

    def check_same(self) -> None:
        """Raise PlanError if the user has frozen or unfrozen parameters after the first step."""
        if self.decided and tuple(p.requires_grad for p in self.model.parameters()) != self._trained:
            raise PlanError(
                f"pipeline={self._pipe.size}: parameters were frozen or unfrozen after the first step. The first step "
                "decides which stage keeps which parameter. Freeze before the run, or use shard instead of pipeline."
            )

    def add_up(self) -> None:
        """Sum gradients over stages, for each parameter that several stages hold. Collective."""
        named = dict(self.model.named_parameters()) if self._shared else {}
        for name, group in self._shared:
            p = named[name]
            if p.grad is None:
                p.grad = torch.zeros_like(p)
            collectives.all_reduce(sharding.local_of(p.grad), group=group, of="tied gradients")

    def clip(self, most: float) -> None:
        """Clip the gradients to a norm of at most `most`, computed over all stages."""
        named = {n: p for n, p in self.model.named_parameters() if p.grad is not None}
        held_by_several = {name for name, _ in self._shared}
        counted = [
            p.grad for n, p in named.items() if p.grad is not None and (n not in held_by_several or n in self._owned)
        ]
        device = next(self.model.parameters()).device
        with together():
            norm = torch.nn.utils.get_total_norm(counted) if counted else torch.zeros((), device=device)
        own = full_tensor(norm)
        squares = collectives.all_reduce(own.double().square(), group=self._pipe.group, of="gradient norm")
        torch.nn.utils.clip_grads_with_norm_(named.values(), most, squares.sqrt().to(own.dtype))


class _Notes:
    """A forward pre-hook that adds its module's name to the set `into` if the module runs in a stage of this rank."""

    def __init__(self, into: set[str], name: str) -> None:
        self._into, self._name = into, name

    def __call__(self, module: nn.Module, *given: Any) -> None:
        if stages.counts(module):
            self._into.add(self._name)


def _drop(model: nn.Module, names: set[str], rank: int) -> None:
    """Free the memory of the parameters in `names`, whose values are on other stages."""
    for name, p in model.named_parameters(remove_duplicate=False):
        if name in names and p not in _absent:
            _absent[p] = True
            sharding.empty(p)
            if p.requires_grad:
                p.register_post_accumulate_grad_hook(functools.partial(_refuse, name, rank))


def _before_load(module: nn.Module, *unused: Any) -> None:
    """Give dropped parameters memory before a load, because torch compares shapes."""
    for p in module.parameters(recurse=False):
        if p in _absent:
            sharding.refill(p)


def _after_load(module: nn.Module, unused: Any) -> None:
    for p in module.parameters(recurse=False):
        if p in _absent:
            sharding.empty(p)


def _refuse(name: str, rank: int, p: Tensor) -> None:
    raise PlanError(
        f"pipeline: on pipeline rank {rank}, the loss reads {name} directly, or the first step did not use this "
        "parameter. Its values are on another rank. Use shard or tensor for this job."
    )


def is_absent(p: Tensor) -> bool:
    """Return whether the values of a parameter are only on other stages of a pipeline."""
    return p in _absent


def own_state(optimizer: Optimizer, saved: dict[str, Any], absent: Any = is_absent) -> dict[str, Any]:
    """Return a loaded optimizer state without the entries of the parameters for which `absent(p)` is true."""
    numbers = [number for group in saved["param_groups"] for number in group["params"]]
    others = {n for n, p in zip(numbers, held_parameters(optimizer), strict=False) if absent(p)}
    return {**saved, "state": {n: entry for n, entry in saved["state"].items() if n not in others}}


def let_go(optimizer: Optimizer) -> None:
    """Delete the optimizer's state of the parameters that this rank has freed, because other pipeline stages hold them.
    An optimizer state that was loaded before may contain such entries."""
    for p in held_parameters(optimizer):
        if p in _absent:
            optimizer.state.pop(p, None)


LOOKS = 2  # how many of a rank's first forwards are checked for writes to parameters


class StageWrites:
    """Finds parameters that this rank's forwards write. Call `begin` before each forward, and `end` after it."""

    def __init__(self) -> None:
        self._left, self._past = LOOKS, list[Tensor]()
        self._before: list[tuple[Tensor, int, int]] = []

    def begin(self, model: nn.Module) -> None:
        """Record the values of parameters before a forward, and let autograd notice earlier writes to them."""
        for p in self._past:
            p.detach().mul_(1)
        if self._left and not rehearsing():
            absent = stages.absent_parameters(model)
            held = [local_of(p).detach() for p in model.parameters() if p not in absent and local_of(p).numel()]
            self._before = list(zip(held, versions(held), hashes_of(held), strict=True))

    def end(self) -> None:
        """Find the parameters that a forward has written without autograd noticing."""
        if self._left and self._before:
            self._left -= 1
            held = [p for p, _, _ in self._before]
            after = zip(self._before, versions(held), hashes_of(held), strict=True)
            self._past += [p for (p, writes, was), now, found in after if found != was and now == writes]
            self._before = []


def refused(error: RuntimeError, ranks: int) -> PlanError | None:
    """Return a PlanError that explains torch's error about a forward that writes parameters."""
    text = str(error)
    if "written-to tensor refers to a single memory location" in text:
        what = "the forward writes into a parameter (p.lerp_(...)) whose values only another stage has"
    elif "has been modified by an inplace operation" in text:
        what = "a forward writes values in place (p.lerp_(...)) that the backward of an earlier microbatch still needs"
    else:
        return None
    return PlanError(
        f"pipeline={ranks}: {what}. Write to a parameter only in the block that contains it, and use it without "
        "gradients (as a teacher or a codebook). Or use data or tensor for this model."
    )
