"""Divide experts that are modules of a list among devices.

Each expert runs on one rank, on the rows of all ranks. The forward of such a mixture loops over its experts, gives each
the rows that were routed to it, and sums the results. It runs twice. In the first run, every expert records its inputs
and returns zeros. Then rows are sent to the experts' ranks, the experts run, and results are sent back. In the second
run, the experts return these results. Other parts of the forward run twice (a router, a shared expert); what they draw,
write and count in the first run is undone.

Every rank of the axis holds a part of each expert parameter, as under shard, so that it is saved, clipped and stepped
like any other. The rank that runs an expert gathers the other parts just before. Shard would gather them on all ranks.

Tested in tests/parallel/test_expert_list.py.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import math
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import Function
from torch.distributed.tensor import DTensor
from torch.func import functional_call

from meshwise.compat.modules import buffers_in, put_forward
from meshwise.compat.reducer import version
from meshwise.compat.tree import map_tensors, tensors_in
from meshwise.parallel.expert_axis import ExpertAxis, exchanged
from meshwise.spec.errors import PlanError
from meshwise.transfer import stages

Given = tuple[Tensor, ...]
INSTEAD = "Use data or shard, which are exact for every mixture of experts."


@dataclass(frozen=True)
class Found:
    """A list of experts, its name, and the module that calls the experts in its forward."""

    name: str
    caller: nn.Module
    experts: tuple[nn.Module, ...]


def lists_of(model: nn.Module) -> Iterator[Found]:
    """Yield the lists of experts in `model`. A list of experts has entries of a single class, and "expert" occurs in
    the name of the list or of the class."""
    modules = dict(model.named_modules())
    for name, container in modules.items():
        entries = tuple(child for child in container.children() if any(True for _ in child.parameters()))
        kinds = {type(entry) for entry in entries}
        if not isinstance(container, nn.ModuleList | nn.ModuleDict) or len(entries) < 2 or len(kinds) > 1:
            continue
        last = name.rpartition(".")[2].lower()
        if "expert" in last or "expert" in type(container).__name__.lower() + kinds.pop().__name__.lower():
            caller = container if _has_forward(container) else modules[name.rpartition(".")[0]]
            if _has_forward(caller):
                yield Found(name or type(container).__name__, caller, entries)


def _has_forward(module: nn.Module) -> bool:
    return type(module).forward is not nn.Module.forward


def check_list(found: Found, model: nn.Module, ranks: int) -> None:
    """Raise PlanError, with the reason, if this list of experts cannot be divided over `ranks` ranks."""
    count = len(found.experts)
    if count < ranks:
        raise PlanError(f"expert={ranks}: {found.name} has {count} experts. Use expert={count} or less.")
    shapes = [{name: p.shape for name, p in expert.named_parameters()} for expert in found.experts]
    places = Counter(id(p) for _, p in model.named_parameters(remove_duplicate=False))
    why = ""
    if any(each != shapes[0] for each in shapes):
        why = "have parameters of different names or shapes"
    elif len({p.dtype for expert in found.experts for p in expert.parameters()}) > 1:
        why = "are stored in several dtypes"
    elif any(not shape for shape in shapes[0].values()):
        why = "have a parameter that is a single number, which cannot be divided"
    elif any(places[id(p)] > 1 for expert in found.experts for p in expert.parameters()):
        why = "share a parameter with another part of the model"
    elif any(True for expert in found.experts for _ in expert.buffers()):
        why = "have buffers (such as a batch norm's statistics), which only one rank would update"
    if why:
        raise PlanError(f"expert={ranks}: the experts of {found.name} {why}. Use data or shard instead of expert.")


@dataclass
class ExpertList:
    """A list of experts. Each expert runs on one rank of `axis`, which receives the expert's inputs from all ranks."""

    found: Found
    axis: ExpertAxis
    _mode: str = ""
    _calls: list[tuple[int, Given]] = field(default_factory=list)
    _answers: deque[tuple[int, Given, Tensor]] = field(default_factory=deque)
    _forwards: list[Callable[..., Any]] = field(default_factory=list)

    def take_over(self) -> None:
        """Replace the forwards of the experts, so that each expert runs on one rank from now on."""
        for number, expert in enumerate(self.found.experts):
            self._forwards.append(expert.forward)
            put_forward(expert, functools.partial(self._called, number))
        put_forward(self.found.caller, functools.partial(self._run, self.found.caller.forward))

    def owner(self, number: int) -> int:
        """Return which rank of `axis` runs the expert with this number."""
        return number * self.axis.size // len(self.found.experts)

    def refused(self, what: str) -> PlanError:
        """Return a PlanError which says that this forward cannot run with divided experts. what: the reason."""
        kind = type(self.found.caller).__name__
        return PlanError(f"expert={self.axis.size} with {self.found.name}, called by {kind}: {what}. {INSTEAD}")

    def _run(self, forward: Callable[..., Any], /, *given: Any, **named: Any) -> Any:
        if self._mode:
            raise self.refused("its forward calls itself")
        try:
            self._mode, self._calls = "note", []
            with _without_trace(self, (given, named)), stages.uncounted():
                forward(*given, **named)
            self._mode = "run"
            with stages.uncounted():
                made, link = answered(self, self._calls)
            self._mode = "answer"
            self._answers = deque((*call, answer) for call, answer in zip(self._calls, made, strict=True))
            result = forward(*given, **named)
            if self._answers:
                raise self.refused("its forward runs twice, but called fewer experts the second time")
            tie: Any = link  # of what it gives, so that every rank has its part in the backward
            return result if tie is None else map_tensors(lambda t: t + tie if t.is_floating_point() else t, result)
        finally:
            self._mode, self._calls, self._answers = "", [], deque()

    def _called(self, number: int, /, *given: Any, **named: Any) -> Any:
        if self._mode == "run":
            return self._forwards[number](*given, **named)
        if not self._mode:
            raise self.refused(f"expert {number} is called outside of this forward, or recomputed in the backward")
        rows = {len(each) if isinstance(each, Tensor) and each.dim() > 1 else None for each in given}
        if named or None in rows or len(rows) != 1:
            raise self.refused(f"expert {number} must take only tensors of 2 dims or more, with equal numbers of rows")
        if self._mode == "note":
            self._calls.append((number, given))
            return given[0].new_zeros(given[0].shape, dtype=_computed_in(given[0]))
        noted, before, made = self._answers.popleft() if self._answers else (-1, given, given[0])
        if noted != number or not all(map(_alike, before, given)):
            raise self.refused(f"the input of expert {number} depends on other experts, but all experts run at once")
        return made


def answered(experts: ExpertList, calls: Sequence[tuple[int, Given]]) -> tuple[list[Tensor], Tensor | None]:
    """Send each call of an expert to the rank that runs this expert, and return the results. Collective, also in the
    backward. Also return a scalar 0, or None without a backward. The caller adds the scalar to its output, so that a
    rank without calls takes part in the backward."""
    axis, facts = experts.axis, [(number, [_form(t) for t in given]) for number, given in calls]
    of_axis, of_all = axis.gather_objects(facts)
    called = sorted({number for rank in of_all for number, _ in rank})
    if not called:
        return [], None
    tie, weights = _whole_parameters(experts, called)
    kinds = {tuple((dtype, grad) for _, dtype, grad in forms) for rank in of_axis for _, forms in rank}
    if len(kinds) > 1:
        raise experts.refused(f"inputs of experts differ in dtype or requires_grad between calls: {kinds}")
    sent = [[given for number, given in calls if experts.owner(number) == r] for r in range(axis.size)]
    taken = [[call for call in rank if experts.owner(call[0]) == axis.rank] for rank in of_axis]
    columns = []
    for place, (dtype, grad) in enumerate(next(iter(kinds), ())):
        flat = [given[place].reshape(-1) for to in sent for given in to]
        none = tie.new_empty(0, dtype=dtype).requires_grad_(grad and torch.is_grad_enabled())
        sizes = [sum(given[place].numel() for given in to) for to in sent]
        comes = [sum(math.prod(forms[place][0]) for _, forms in rank) for rank in taken]
        columns.append(exchanged(axis, sizes, comes, axis.size, torch.cat(flat) if flat else none)[0])
    outs = _run_own(experts, weights, [call for rank in taken for call in rank], columns)
    ties = [tie, *columns, *(p for each in weights.values() for p in each.values())]
    dtype = _dtype_of_all(experts, outs, next(iter(kinds), ((tie.dtype, True),))[0][0])
    flat_out = torch.cat([*(out.reshape(-1) for out in outs), *(t.reshape(-1)[:0].to(dtype) for t in ties)])
    sizes = [sum(math.prod(forms[0][0]) for _, forms in rank) for rank in taken]
    comes = [sum(given[0].numel() for given in to) for to in sent]
    (back,) = exchanged(axis, sizes, comes, 1 / axis.size, flat_out)
    # Its index is saved on every rank: a block that runs again in the backward does so before this exchange on all.
    link = back[torch.zeros(0, dtype=torch.int64, device=back.device)].sum() if back.requires_grad else None
    order = sorted(range(len(calls)), key=lambda place: experts.owner(calls[place][0]))
    made: list[Tensor] = [back] * len(calls)
    for place, piece in zip(order, back.split([calls[place][1][0].numel() for place in order]), strict=True):
        made[place] = piece.view(calls[place][1][0].shape).clone()  # the program may write into it
    return made, link


def _run_own(
    experts: ExpertList, weights: dict[int, dict[str, Tensor]], calls: list[Any], columns: Sequence[Tensor]
) -> list[Tensor]:
    """Run this rank's experts on the inputs that all ranks have sent. Return the results. columns: one flat tensor for
    each argument of an expert, with the values of the argument in all `calls`, in order."""
    parts = [column.split([math.prod(forms[place][0]) for _, forms in calls]) for place, column in enumerate(columns)]
    given = [tuple(p[n].view(f[0]) for p, f in zip(parts, forms, strict=True)) for n, (_, forms) in enumerate(calls)]
    outs: list[Tensor] = [torch.empty(0)] * len(calls)
    for number, of_expert in weights.items():
        own = [n for n, call in enumerate(calls) if call[0] == number]
        alike = len({tuple(t.shape[1:] for t in given[n]) for n in own}) == 1
        for batch in [own] if alike else [[n] for n in own]:
            rows = tuple(torch.cat(column) for column in zip(*(given[n] for n in batch), strict=True))
            made = functional_call(experts.found.experts[number], of_expert, rows)
            if not isinstance(made, Tensor) or made.shape != rows[0].shape:
                shape = tuple(made.shape) if isinstance(made, Tensor) else type(made).__name__
                raise experts.refused(f"expert {number} returns {shape} for {tuple(rows[0].shape)}; shapes must match")
            for n, out in zip(batch, made.split([len(given[n][0]) for n in batch]), strict=True):
                outs[n] = out
    return outs


def _dtype_of_all(experts: ExpertList, outs: Sequence[Tensor], given: torch.dtype) -> torch.dtype:
    """Return the dtype of the experts' results. Collective with autocast, as ranks may compute in different dtypes."""
    kinds = {out.dtype for out in outs}
    if torch.is_autocast_enabled(experts.axis.device):
        kinds = set().union(*experts.axis.gather_objects(kinds)[0])
    if kinds - {given} and (len(kinds) > 1 or not torch.is_autocast_enabled(experts.axis.device)):
        raise experts.refused(f"experts return {kinds} for inputs of {given}; the dtypes must be equal")
    return next(iter(kinds), given)


def _whole_parameters(experts: ExpertList, called: Sequence[int]) -> tuple[Tensor, dict[int, dict[str, Tensor]]]:
    """Gather the whole parameters of the experts in `called` that run on this rank, by expert number and name. Also
    return an empty tensor that the caller's result must depend on, so that all ranks run the backward."""
    named = [(n, name, p) for n in called for name, p in experts.found.experts[n].named_parameters()]
    parts = [p.to_local() if isinstance(p, DTensor) else p for _, _, p in named]
    facts = [_Fact(experts.owner(n), p.shape, p.requires_grad) for n, _, p in named]
    function: Any = _Whole
    tie, *wholes = function.apply(experts.axis, facts, *parts)
    weights: dict[int, dict[str, Tensor]] = {n: {} for n in called if experts.owner(n) == experts.axis.rank}
    for (n, name, _), whole in zip([e for e in named if e[0] in weights], wholes, strict=True):
        weights[n][name] = whole
    return tie, weights


@dataclass(frozen=True)
class _Fact:
    """A parameter of an expert. owner: the index, on the expert axis, of the rank that runs the expert."""

    owner: int
    shape: torch.Size
    trained: bool

    def bounds(self, axis: ExpertAxis) -> list[tuple[int, int]]:
        """Return the range of rows (begin, end) that each rank holds. Rows are divided as by `torch.chunk`."""
        step = -(-self.shape[0] // axis.size)
        ends = [min(self.shape[0], rank * step) for rank in range(axis.size + 1)]
        return list(itertools.pairwise(ends))

    def sizes(self, axis: ExpertAxis) -> list[int]:
        """Return the number of elements of this parameter on each rank of the axis, in the order of the ranks."""
        return [(end - begin) * math.prod(self.shape[1:]) for begin, end in self.bounds(axis)]


class _Whole(Function):
    """Gathers each expert's parameters on the rank that runs it. Averages gradients over ranks with equal experts."""

    @staticmethod
    def forward(ctx: Any, axis: ExpertAxis, facts: list[_Fact], *parts: Tensor) -> tuple[Tensor, ...]:
        ctx.axis, ctx.facts = axis, facts
        like, own = parts[0].new_empty(0), [fact for fact in facts if fact.owner == axis.rank]
        sent = [
            torch.cat([like, *(p.reshape(-1) for p, fact in zip(parts, facts, strict=True) if fact.owner == rank)])
            for rank in range(axis.size)
        ]
        sizes = [[fact.sizes(axis)[rank] for fact in own] for rank in range(axis.size)]
        taken = [like.new_empty(sum(each)) for each in sizes]
        axis.exchange(sent, taken)
        pieces = [rows.split(each) for rows, each in zip(taken, sizes, strict=True)]
        wholes = [torch.cat([of[n] for of in pieces]).view(fact.shape) for n, fact in enumerate(own)]
        for fact, whole in zip(own, wholes, strict=True):
            if not fact.trained:
                ctx.mark_non_differentiable(whole)
        return like, *wholes

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        axis, facts = ctx.axis, ctx.facts
        mine = zip((f for f in facts if f.owner == axis.rank), gradients[1:], strict=True)
        own = [(fact, g) for fact, g in mine if fact.trained]
        like = gradients[0].new_empty(0)
        sent = [
            torch.cat([like, *(g[slice(*fact.bounds(axis)[rank])].reshape(-1) for fact, g in own)])
            for rank in range(axis.size)
        ]
        trained = [fact for fact in facts if fact.trained]
        sizes = [fact.sizes(axis)[axis.rank] for fact in trained]
        to = [sum(n for n, fact in zip(sizes, trained, strict=True) if fact.owner == rank) for rank in range(axis.size)]
        every = like.new_empty(sum(sizes))  # experts, and so the ranks that have them, are in order
        axis.exchange(sent, every.split(to))
        axis.mean_of_replicas(every)
        found = iter(every.split(sizes))
        local = [(next(found), fact) if fact.trained else None for fact in facts]
        return None, None, *(each and each[0].view(-1, *each[1].shape[1:]) for each in local)


@contextlib.contextmanager
def _without_trace(experts: ExpertList, given: Any) -> Iterator[None]:
    """Run the `with` block, a trial run of the forward, and then undo its effects: random state, attributes, buffers,
    lists and dicts are as before. Raise PlanError if the forward changed an input tensor."""
    tensors = list(tensors_in(given))
    versions = [version(t) for t in tensors]
    inside = {part for expert in experts.found.experts for part in expert.modules()}
    modules = [part for part in experts.found.caller.modules() if part not in inside]
    held: list[Any] = [*(vars(part) for part in modules), *_containers(given)]
    held += [value for part in modules for value in vars(part).values() if type(value) in (list, dict, set)]
    before = [copy.copy(each) for each in held]
    for part in modules:
        buffers = buffers_in(part)
        buffers.update({name: b.clone() for name, b in buffers.items() if b is not None})
    kind = experts.axis.device
    own = {} if kind == "cpu" else {"devices": [torch.accelerator.current_device_index()], "device_type": kind}
    try:
        with torch.random.fork_rng(**(own or {"devices": []})):
            yield
    finally:
        for each, was in zip(held, before, strict=True):
            each.clear()
            each.extend(was) if isinstance(each, list) else each.update(was)
    if [version(t) for t in tensors] != versions:
        raise experts.refused("its forward runs twice, so it must not change its inputs (x = x * y instead of x *= y)")


def _containers(value: Any) -> Iterator[Any]:
    if type(value) in (list, dict, set, tuple):
        if type(value) is not tuple:
            yield value
        for each in value.values() if type(value) is dict else value:
            yield from _containers(each)


def _computed_in(tensor: Tensor) -> torch.dtype:
    kind = tensor.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else tensor.dtype


def _form(tensor: Tensor) -> tuple[tuple[int, ...], torch.dtype, bool]:
    return tuple(tensor.shape), tensor.dtype, tensor.requires_grad


def _alike(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors hold the same numbers. NaN counts as equal to NaN."""
    return one.shape == other.shape and bool(((one == other) | (one != one)).all())
