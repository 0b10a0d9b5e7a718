"""Replay a constructor's operators with the real random numbers.

The operators run in their recorded order.

Operators on which no wanted tensor depends are skipped, except random operators, which advance the generator as
recorded. A storage is made when it is first filled, and freed when no operator needs its values any more. If a later
operator overwrites a storage, it is freed meanwhile. So a replay holds the wanted tensors and about one more tensor.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from meshwise.torch_compat.tree import leaves_of, map_kind

DRAWS = {"normal_", "uniform_", "random_", "exponential_", "cauchy_", "log_normal_", "geometric_", "bernoulli_"}
FILLS = DRAWS | {"zero_", "fill_", "copy_"}
"""In-place operators that do not read their target if they overwrite all of it."""
Finished = Callable[[int, torch.UntypedStorage], None]


class ReplayMismatch(Exception):
    """Raised if an operator cannot be recorded, or returns something else in the replay than when it was recorded."""


@dataclass(frozen=True)
class StorageView:
    """A tensor as a view of a recorded storage.

    storage, nbytes: the number and the size of the storage.
    """

    storage: int
    nbytes: int
    dtype: torch.dtype
    device: torch.device
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @property
    def whole(self) -> bool:
        """Whether the tensor covers its whole storage and is contiguous."""
        expected, step = [], 1
        for length in reversed(self.size):
            expected.append(step)
            step *= length
        return math.prod(self.size) * self.dtype.itemsize == self.nbytes and self.stride == tuple(reversed(expected))

    def of(self, storage: torch.UntypedStorage) -> Tensor:
        """Return a tensor that is a view of the storage `storage`, with the dtype, size, strides and offset of this
        `StorageView`."""
        return torch.empty(0, dtype=self.dtype, device=self.device).set_(storage, self.offset, self.size, self.stride)


@dataclass(frozen=True)
class RecordedOp:
    """A recorded operator. In its arguments, `StorageView` objects stand for recorded tensors; other tensors are
    real."""

    operator: Any
    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Any
    reads: frozenset[int]
    writes: frozenset[int]
    fresh: frozenset[int]
    generator: torch.Generator | None
    default: torch.dtype

    @property
    def fills(self) -> bool:
        """Whether the operator overwrites all of its first argument without reading it."""
        first = self.args[0] if self.args else None
        others = {view.storage for view in leaves_of(StorageView, (self.args[1:], self.kwargs))}
        return isinstance(first, StorageView) and self.name in FILLS and first.whole and first.storage not in others


@dataclass(frozen=True)
class SetGenerator:
    """An entry of an `OpRecord` that says that the program set a random generator."""

    generator: torch.Generator
    to: Tensor | int


Entry = RecordedOp | SetGenerator


@dataclass(frozen=True)
class ReplayStep:
    """An entry of an `OpRecord` that a replay has to run. Entries without effect on the result have no `ReplayStep`."""

    index: int
    entry: Entry
    rng_only: bool = False
    """Whether the operator runs only to advance its random generator, so that its result is thrown away."""
    done: tuple[int, ...] = ()


def steps_for(entries: Sequence[Entry], keep: Iterable[int]) -> list[ReplayStep]:
    """Return a `ReplayStep` for each entry that a replay has to run, in order."""
    live, later = set(keep), set[int]()
    steps: list[ReplayStep] = []
    for index in reversed(range(len(entries))):
        entry = entries[index]
        if isinstance(entry, SetGenerator):
            steps.append(ReplayStep(index, entry))
            continue
        fills = entry.fills
        useful = bool((entry.writes | entry.fresh) & live)
        if not useful and entry.generator is not None and fills:
            steps.append(ReplayStep(index, entry, rng_only=True))
        elif useful or entry.generator is not None:
            touched = entry.reads | entry.writes | entry.fresh
            # A storage that is refilled before its next read need not live until then.
            done = tuple(sorted(s for s in touched if s not in later or s not in live))
            steps.append(ReplayStep(index, entry, done=done))
            later |= touched
            made = entry.fresh | (entry.writes if fills else set())
            live = (live - made) | (entry.reads - (entry.writes if fills else set()))
    return steps[::-1]


def replay(entries: Sequence[Entry], keep: Iterable[int], finished: Finished) -> None:
    """Run `entries` again. Call `finished` with each storage of `keep` once it has its final values."""
    keep = set(keep)
    marks = {entry.to for entry in entries if isinstance(entry, SetGenerator) and isinstance(entry.to, int)}
    states: dict[int, Tensor] = {-1: torch.default_generator.get_state()}
    storages: dict[int, torch.UntypedStorage] = {}
    before = torch.get_default_dtype()
    steps = steps_for(entries, keep)
    last = {number: step.index for step in steps for number in step.done}
    try:
        with torch.no_grad():
            for step in steps:
                generator = step.entry.generator
                if isinstance(step.entry, SetGenerator):
                    to = step.entry.to
                    step.entry.generator.set_state(states[to] if isinstance(to, int) else to)
                    if step.index in marks:
                        states[step.index] = step.entry.generator.get_state()
                    continue
                torch.set_default_dtype(step.entry.default)
                _run(step.entry, storages, step.rng_only)
                if generator is not None and step.index in marks:
                    states[step.index] = generator.get_state()
                for number in step.done:
                    storage = storages.pop(number, None)
                    if number in keep and last[number] == step.index and storage is not None:
                        finished(number, storage)
                    del storage  # free this storage before the next one is made
    finally:
        torch.set_default_dtype(before)


def _run(call: RecordedOp, storages: dict[int, torch.UntypedStorage], rng_only: bool) -> None:
    def real(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.clone()  # the replay must not write into tensors that were made outside of the recording
        if value.storage not in storages:
            storages[value.storage] = torch.UntypedStorage(value.nbytes, device=value.device)
        return value.of(storages[value.storage])

    if rng_only:
        view: StorageView = call.args[0]
        scratch = torch.empty_strided(view.size, view.stride, dtype=view.dtype, device=view.device)
        args, kwargs = map_kind((Tensor, StorageView), real, (call.args[1:], call.kwargs))
        call.operator(scratch, *args, **kwargs)
        return
    args, kwargs = map_kind((Tensor, StorageView), real, (call.args, call.kwargs))
    result = call.operator(*args, **kwargs)
    _take(call, call.result, result, storages)


def _take(call: RecordedOp, views: Any, result: Any, storages: dict[int, torch.UntypedStorage]) -> None:
    if isinstance(views, list | tuple):
        for view, part in zip(views, result, strict=True):
            _take(call, view, part, storages)
    elif isinstance(views, StorageView):
        _check(call, views, result)
        storages.setdefault(views.storage, result.untyped_storage())


def _check(call: RecordedOp, view: StorageView, result: Tensor) -> None:
    expected = (view.dtype, view.size, view.offset if math.prod(view.size) else 0)
    given = (result.dtype, tuple(result.shape), result.storage_offset() if result.numel() else 0)
    steps = [(a, b) for a, b, n in zip(view.stride, result.stride(), view.size, strict=False) if n > 1]
    if expected != given or (result.numel() and any(a != b for a, b in steps)):
        raise ReplayMismatch(
            f"{call.name} returned shape {given[1]}, dtype {given[0]}, strides {tuple(result.stride())}; on fake "
            f"tensors it returned shape {expected[1]}, dtype {expected[0]}, strides {view.stride}"
        )
