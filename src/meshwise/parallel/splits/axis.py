"""Define axes of ranks, and how tensors are split over them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional

from meshwise.transfer import collectives
from meshwise.transfer.reading import meet

_own: dict[str, MeshAxis] = {}
"""The most recently made axis of each name, with this rank's position on the axis."""


class Axis:
    """The ranks that hold the parts of a tensor, with the collectives between these ranks."""

    name: str
    size: int
    rank: int
    group: collectives.Group
    sequence: bool = False
    proves: bool = False
    gradient_scale: int = 1

    def averages(self, whole: Tensor) -> bool:
        """Return whether the gradients that the ranks compute for this whole tensor are averaged after the backward."""
        return False

    def unheard(self) -> AbstractContextManager[None]:
        """Return a context manager for exchanges that do not count as mixing rows, such as those of a batch norm."""
        return nullcontext()

    def divides(self, whole: Tensor, dim: int) -> None:
        """Record that each rank is about to take its part of a whole tensor along `dim`."""

    def meet(self, what: str) -> None:
        """Wait until all ranks are about to exchange `what`."""
        meet(what)

    def all_reduce(self, tensor: Tensor, op: str = "sum") -> Tensor:
        """Reduce `tensor` over the ranks, in place, and return it."""
        return collectives.all_reduce(tensor, op, self.group, of=self.name)

    def all_gather(self, tensor: Tensor) -> Tensor:
        """Gather `tensor` from every rank, stacked in rank order."""
        return collectives.all_gather(tensor, self.group, of=self.name)

    def reduce_scatter(self, tensor: Tensor) -> Tensor:
        """Sum `tensor` over the ranks, and return this rank's entry of its first dim, which has one for each rank."""
        return collectives.reduce_scatter(tensor, group=self.group)[0]

    def pass_on(self, tensor: Tensor) -> Tensor:
        """Send `tensor` to the next rank, and return the tensor of the rank before. All tensors have the same shape."""
        taken = torch.empty_like(tensor)
        to, source = (self.rank + 1) % self.size, (self.rank - 1) % self.size
        collectives.send_receive([(tensor, to)], [(taken, source)], self.group)
        return taken

    def all_to_all(self, tensor: Tensor) -> Tensor:
        """Send entry i of the first dim to rank i, and return the entries sent to this rank, in rank order."""
        return collectives.all_to_all(tensor, self.group)


@dataclass(frozen=True)
class MeshAxis(Axis):
    """A named axis of the device mesh.

    group: the ranks that differ from this rank only on this axis.
    """

    name: str
    size: int
    rank: int
    group: collectives.Group
    sequence: bool = False

    def __post_init__(self) -> None:
        _own[self.name] = self

    @classmethod
    def of(cls, mesh: DeviceMesh, name: str, *, sequence: bool = False) -> MeshAxis:
        """Return the axis named `name` of `mesh`."""
        one = mesh[name]
        return cls(name, one.size(), one.get_local_rank(), one.get_group(), sequence)

    def __deepcopy__(self, memo: Any) -> MeshAxis:
        """Return the axis itself, because a copied model has its parts on the same ranks."""
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the axis by its name, which on another pipeline stage stands for that stage's axis."""
        return _axis_named, (self.name,)


def _axis_named(name: str) -> MeshAxis:
    return _own[name]


Range = tuple[int, int]


@dataclass(frozen=True)
class SplitPart:
    """How a tensor is split along `dim` over the ranks of an axis. In the whole tensor, this dim has length `length`.

    repeats: how many equal sections the dim has, each divided over the ranks in the same way. It is above 1 after a
        reshape merged a split dim into the dim before it: (2 samples, 8 split positions) -> length 16, 2 repeats.
    pieces: for each rank, the ranges (begin, end) of entries that the rank holds in each section, ascending. None if
        each section is divided as by `torch.chunk`.
    """

    axis: Axis
    dim: int
    length: int
    repeats: int = 1
    pieces: tuple[tuple[Range, ...], ...] | None = None

    @property
    def run(self) -> int:
        """The length of one of the `repeats` equal sections of the dim: `length` 16 and `repeats` 2 -> 8."""
        return self.length // self.repeats

    @property
    def is_plain(self) -> bool:
        """Whether the dim is divided over the ranks as by `torch.chunk`, so that each rank holds one range of it."""
        return self.repeats == 1 and self.pieces is None

    def of_rank(self, rank: int) -> tuple[Range, ...]:
        """Return the ranges (begin, end) of entries that a rank holds, such as ((0, 4),). Empty ranges are left out.

        If `repeats` is above 1, the ranges count the entries of one section.
        """
        if self.pieces is not None:
            return self.pieces[rank]
        step = -(-self.run // self.axis.size)
        begin, end = min(self.run, rank * step), min(self.run, (rank + 1) * step)
        return ((begin, end),) if begin < end else ()

    @property
    def ranges(self) -> list[tuple[Range, ...]]:
        """The result of `of_rank` for each rank."""
        return [self.of_rank(rank) for rank in range(self.axis.size)]

    def held(self, rank: int) -> int:
        """Return how many entries of the dim a rank holds. If `repeats` is above 1, only the entries of one section
        count.
        """
        return sum(end - begin for begin, end in self.of_rank(rank))

    @property
    def begin(self) -> int:
        """The index of this rank's first entry in the whole dim. Only valid if `is_plain` is True."""
        return min(self.length, self.axis.rank * -(-self.length // self.axis.size))

    @property
    def own(self) -> int:
        """How many entries of the split dim this rank holds in total."""
        return self.repeats * self.held(self.axis.rank)

    @property
    def is_even(self) -> bool:
        """Whether the dim is divided as by `torch.chunk`, and every rank holds the same number of entries."""
        return self.is_plain and self.length % self.axis.size == 0

    def alike(self, other: SplitPart) -> bool:
        """Return whether `other` divides a dim over the ranks in the same way as this split. The two splits may have
        different values of `dim`."""
        mine, others = (self.length, self.repeats, self.pieces), (other.length, other.repeats, other.pieces)
        return self is other or (self.axis == other.axis and mine == others)

    def divided(self, pieces: Sequence[Sequence[Range]], length: int) -> SplitPart:
        """Return a split along `self.dim` for another tensor, whose dim has length `length` in the whole tensor.

        pieces: for each rank, the ranges (begin, end) of entries that the rank holds.
        """
        new = tuple(tuple(_joined(each)) for each in pieces)
        plain = SplitPart(self.axis, self.dim, length)
        return plain if tuple(plain.ranges) == new else replace(plain, pieces=new)

    def folded(self) -> SplitPart:
        """Return a split that gives each rank a range in the first half of the dim, and the mirrored range in the
        second half. For 8 entries and 2 ranks, rank 0 holds 0-2 and 6-8, and rank 1 holds 2-6.

        With this split, all ranks have the same amount of work under a causal mask.
        """
        ends = [self.length * place // (2 * self.axis.size) for place in range(2 * self.axis.size + 1)]
        pairs = [(rank, 2 * self.axis.size - 1 - rank) for rank in range(self.axis.size)]
        return self.divided([[(ends[n], ends[n + 1]) for n in pair] for pair in pairs], self.length)

    def scaled(self, run: int) -> SplitPart | None:
        """Return how a tensor is split after a reshape that merges the split dim with the next dims, or divides it.

        For example, (8,) held as 0-4 and 4-8 becomes (2, 4) held as 0-1 and 1-2. Returns None if a rank would hold only
        a part of an entry of the new dim.

        run: the length of the split dim after the reshape (of one section, if `repeats` is above 1). In the example, it
            is 2.
        """
        every = self.ranges
        if self.run == 0 or any(bound * run % self.run for held in every for each in held for bound in each):
            return None
        bounds = [[(begin * run // self.run, end * run // self.run) for begin, end in held] for held in every]
        new = self.divided(bounds, run)
        return replace(new, length=run * self.repeats, repeats=self.repeats)

    def slice_of(self, whole: Tensor) -> Tensor:
        """Return this rank's part of `whole`. The result is a view if the part is contiguous in `whole`."""
        dim = self.dim
        if self.repeats > 1:
            whole, dim = whole.unflatten(dim, (self.repeats, self.run)), dim + 1
        parts = [whole.narrow(dim, begin, end - begin) for begin, end in self.of_rank(self.axis.rank) or ((0, 0),)]
        part = parts[0] if len(parts) == 1 else torch.cat(parts, dim)
        return part.flatten(self.dim, dim) if self.repeats > 1 else part

    def summed(self, value: Tensor) -> Tensor:
        """Add up the ranks' values of a tensor, and return this rank's part of the sum. Collective. Only valid if
        `is_plain` is True.

        value: this rank's value, which has the shape of the whole tensor.
        """
        size, dim = self.axis.size, self.dim
        step = -(-self.length // size)
        if self.length < size * step:
            value = functional.pad(value, [0, 0] * (value.dim() - dim - 1) + [0, size * step - self.length])
        parts = value.unflatten(dim, (size, step)).movedim(dim, 0).contiguous()
        return self.axis.reduce_scatter(parts).narrow(dim, 0, self.own)

    def gathered(self, local: Tensor) -> Tensor:
        """Gather the parts of all ranks, and return the whole tensor. Collective."""
        dim, ranks = self.dim, range(self.axis.size)
        if self.repeats > 1:
            local, dim = local.unflatten(dim, (self.repeats, local.shape[dim] // self.repeats)), dim + 1
        longest = max(self.held(rank) for rank in ranks)
        if local.shape[dim] < longest:
            local = functional.pad(local, [0, 0] * (local.dim() - dim - 1) + [0, longest - local.shape[dim]])
        parts = self.axis.all_gather(local.contiguous())
        found: list[tuple[int, Tensor]] = []
        for rank in ranks:
            at = 0
            for begin, end in self.of_rank(rank):
                found.append((begin, parts[rank].narrow(dim, at, end - begin)))
                at += end - begin
        in_order = [each for _, each in sorted(found, key=lambda each: each[0])]
        whole = torch.cat(in_order, dim) if in_order else parts[0].narrow(dim, 0, 0)
        return whole.flatten(self.dim, dim) if self.repeats > 1 else whole


def _joined(pieces: Sequence[Range]) -> list[Range]:
    """Drop empty ranges and merge adjacent ranges. The given ranges must be in rising order."""
    found: list[Range] = []
    for begin, end in pieces:
        if begin < end:
            if found and found[-1][1] == begin:
                found[-1] = found[-1][0], end
            else:
                found.append((begin, end))
    return found
