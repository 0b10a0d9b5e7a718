"""Split a batch that all ranks hold: `mw.split`.

Each rank gets its rows. It is for programs without a loader.

x, y = mw.split(x, y) rows; a rank without any gets one as padding, which counts for nothing graph = mw.split(graph,
whole=True) what rows cannot cut runs on every rank, as on one device

A checksum of each batch is sent along with the loss, to check that all ranks hold the same (see agreed.py).
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from meshwise.compat.tree import all_leaves, leaves_of, map_leaves
from meshwise.data.order import BatchSlice, batch_slice, divides_evenly
from meshwise.engine.carried import Carried
from meshwise.engine.model_stream import ModelStream
from meshwise.spec.errors import UsageError
from meshwise.spec.user_code import place, user_frame
from meshwise.spec.world import World
from meshwise.transfer import collectives
from meshwise.transfer.checksum import sampled_sum
from meshwise.transfer.splitmix import mixed_bits


@dataclass(frozen=True)
class _Given:
    """One call of `mw.split`: its source line, the shapes of its arguments, and their checksum as a tensor on the
    device."""

    line: tuple[str, int]
    shapes: str
    checksum: Tensor

    @property
    def place(self) -> str:
        return place(*self.line)


class Splits:
    """Handles the batches of `mw.split`. It selects this rank's rows, sets the random state for them, and compares the
    batches over the ranks."""

    def __init__(self, world: World, stream: ModelStream, notify: Callable[[str], None], agreed: Carried) -> None:
        """stream: the random numbers from which models draw in their forward.
        notify: prints a line for the user.
        agreed: checks that all ranks pass equal batches to `mw.split`, and raises UsageError if they do not."""
        self._world, self.stream, self._notify, self._agreed = world, stream, notify, agreed
        agreed.batches = self
        self._sum = torch.zeros((), dtype=torch.int64)
        self._unchecked: list[_Given] = []
        self._parts: list[BatchSlice] = []  # since the last backward or sum
        self._used = False

    def begin(self, batch: tuple[Any, ...], before: BatchSlice | None, *, whole: bool, dim: int) -> BatchSlice:
        """Return this rank's slice of a batch that the program passes to `mw.split`.

        before: this rank's slice of the batch that was current until now; None if there was none.
        whole: whether every rank gets all rows of the batch.
        dim: the dim along which the rows are counted."""
        rows = _rows(batch, dim, whole)
        if before is not (self._parts[-1] if self._parts else None):
            self._parts = [] if before is None else [before]
        elif self._used:
            self._parts = []
        every = torch.arange(rows)
        mine = BatchSlice(every, rows, rows, 0, rows, whole=True)
        mine = mine if whole else batch_slice(every, 0, rows, rows, self._world)
        self._parts.append(mine)
        self._used = False
        return mine

    def cut(self, batch: tuple[Any, ...], mine: BatchSlice, dim: int, models: Iterable[nn.Module]) -> tuple[Any, ...]:
        """Return this rank's rows of a batch. From now on, `models` draw random numbers (e.g. dropout masks) for these
        rows.
        mine: says which rows this rank has.
        dim: the dimension of the rows."""
        key = self.stream.begin(mine, models)
        if self._world.size == 1:
            return batch
        frame = user_frame()
        line = ("", 0) if frame is None else (frame.f_code.co_filename, frame.f_lineno)
        of_draws = (key,) if mine.whole else ()  # who runs the whole batch draws as one device does, on every rank
        shapes = ", ".join(_shape(leaf) for leaf in all_leaves(batch) if _is_array(leaf))
        self._unchecked.append(_Given(line, shapes, _checksum((*batch, *of_draws))))
        if mine.whole:
            self._notify(
                f"{place(*line)}: mw.split(whole=True): every rank runs the whole batch, so several devices are no "
                "faster than one."
            )
            return batch
        first, count = int(mine.indices[0]), len(mine.indices)
        return tuple(map_leaves(lambda leaf: _cut(leaf, dim, first, count), tree, _is_array) for tree in batch)

    def backward(self, weight: object) -> AbstractContextManager[None]:
        """Return a context manager for a backward. weight: the weight that the program gave for the loss, or None.

        Raise UsageError if it is unknown over which batch the loss is a mean: it has no weight, and the ranks have
        different shares of the batches that were split since the last backward."""
        shares = {None if p.whole or divides_evenly(p.total, self._world) else p.total for p in self._parts}
        self._used = True
        if weight is None and len(shares) > 1:
            sizes = " and ".join(str(part.total) for part in self._parts)
            raise UsageError(
                f"mw.backward: mw.split has cut batches of {sizes} samples since the last mw.backward. The ranks' "
                "shares of these batches differ, so it is unknown over which one the loss is a mean. Call mw.backward "
                "before the next mw.split, or pass the loss's number of samples: mw.backward(loss, weight=len(x))."
            )
        return self.stream.backward()

    def is_at(self, part: BatchSlice | None) -> bool:
        """Return whether `part` is this rank's slice of the batch that was split last."""
        return bool(self._parts) and part is self._parts[-1]

    def check_sum(self) -> bool:
        """Return True if a value computed from the batch is the sum over the whole batch already
        (`mw.split(whole=True)`). Return False if the values of the ranks must be added.

        Raise UsageError if several batches were split and only some have `whole=True`, or a batch has fewer samples
        than there are ranks. If the ranks have not compared their batches yet, compare them, which is collective."""
        parts, self._used = self._parts, True
        wholes = {p.whole for p in parts}
        if len(wholes) > 1 or (len(parts) > 1 and any(p.samples == 0 or p.total < self._world.size for p in parts)):
            raise UsageError(
                "mw.sum: mw.split was called for several batches, and their values cannot be summed alike (one has "
                "padding, or whole=True). Call mw.sum after each mw.split, on the value of that batch."
            )
        if self._unchecked:
            self._agreed.compare(collectives.all_reduce_mean(self._agreed.signs(torch.zeros(()))))
        return wholes == {True}

    def checksum(self, device: torch.device) -> Tensor:
        """Return a checksum of all batches split so far, as a scalar on `device`."""
        total = self._sum.to(device)
        for given in self._unchecked:
            total = mixed_bits(total + given.checksum.to(device))
        self._sum = total
        return total

    def take(self) -> list[_Given]:
        """Return the calls of `mw.split` since `take` was last called."""
        given, self._unchecked = self._unchecked, []
        return given

    def told(self, taken: list[_Given]) -> list[tuple[str, str, int]]:
        """Return (source line, shapes, checksum) for each call of `mw.split` in `taken`, to be sent to the other
        ranks."""
        return [(g.place, g.shapes, int(g.checksum)) for g in taken]

    def explain(self, ranks: list[list[tuple[str, str, int]]]) -> str:
        """Return a sentence that says how the batches of the ranks differ. ranks: what `told` returned on each rank."""
        mine = ranks[self._world.rank]
        shortest = min(map(len, ranks))
        number = next((n for n in range(shortest) if len({tuple(rank[n]) for rank in ranks}) > 1), None)
        if number is None:
            return f"{mine[-1][0] if mine else 'mw.split'}: the ranks called mw.split a different number of times."
        where, calls = mine[number][0], [rank[number] for rank in ranks]
        places, shapes = {call[0] for call in calls}, {call[1] for call in calls}
        if len(places) > 1:
            what = f"the ranks call it on other lines ({'; '.join(f'rank {r}: {c[0]}' for r, c in enumerate(calls))})"
        elif len(shapes) > 1:
            what = f"the ranks pass different shapes ({'; '.join(f'rank {r}: {c[1]}' for r, c in enumerate(calls))})"
        else:
            what = "the ranks pass different batches"
        return (
            f"{where}: mw.split: {what}. Pass the same whole batch on every rank: seed all ranks alike, and draw the "
            "whole batch outside the model. Inside a loop over a distributed loader, each rank draws its own numbers: "
            "there, draw as many rows as this rank has, without mw.split, or use your own torch.Generator."
        )


def _is_array(value: Any) -> bool:
    return isinstance(value, Tensor | numpy.ndarray)


def _rows(batch: tuple[Any, ...], dim: int, whole: bool) -> int:
    """Return how many rows the batch has. Raise UsageError if it has none, or if its tensors have different numbers of
    rows."""
    if not batch:
        raise UsageError("mw.split() was called without a batch. Write x, y = mw.split(x, y).")
    arrays = [leaf for leaf in all_leaves(batch) if _is_array(leaf)]
    if whole:
        return next((len(array) for array in arrays if array.ndim and len(array)), 1)
    others = [leaf for leaf in all_leaves(batch) if leaf is not None and not _is_array(leaf)]
    others += leaves_of(PackedSequence, batch)
    if others:
        raise UsageError(
            f"mw.split cuts tensors and arrays by rows, but this batch contains a {type(others[0]).__name__}. Remove "
            "it, convert it to a tensor, or let every rank run the whole batch: mw.split(…, whole=True)."
        )
    counts = {array.shape[dim] for array in arrays if array.ndim > dim}
    if len(counts) != 1 or 0 in counts:
        shapes = ", ".join(map(_shape, arrays))
        raise UsageError(
            f"mw.split: the tensors of a batch must have the same number of rows, at least one, but are {shapes}. "
            "Split tensors of other sizes in a separate call, or name the dimension of the samples: mw.split(…, dim=1)."
        )
    return int(counts.pop())


def _cut(leaf: Any, dim: int, first: int, count: int) -> Any:
    if leaf.ndim <= dim:
        return leaf
    if isinstance(leaf, Tensor):
        return leaf.narrow(dim, first, count)
    return leaf[(slice(None),) * dim + (slice(first, first + count),)]


def _shape(array: Any) -> str:
    return f"{str(array.dtype).removeprefix('torch.')} {tuple(array.shape)}"


def _checksum(tree: Any) -> Tensor:
    """Return a checksum of the tensors, arrays, numbers and strings in a tree. It is a scalar tensor on the device of
    the last tensor."""
    total = torch.zeros((), dtype=torch.int64)
    for leaf in all_leaves(tree):
        own = _sum_of(leaf)
        total = mixed_bits(total.to(own.device) + own)
    return total


def _sum_of(leaf: Any) -> Tensor:
    if isinstance(leaf, numpy.ndarray) and leaf.dtype.kind in "biufc":
        leaf = torch.from_numpy(numpy.ascontiguousarray(leaf))
    if not isinstance(leaf, Tensor):
        known = leaf if isinstance(leaf, int | float | str | numpy.ndarray) else type(leaf).__name__
        return torch.tensor(zlib.crc32(repr(known).encode()))
    if leaf.layout != torch.strided:
        leaf = leaf.detach().coalesce().values() if leaf.layout == torch.sparse_coo else leaf.detach().values()
    return sampled_sum(leaf)
