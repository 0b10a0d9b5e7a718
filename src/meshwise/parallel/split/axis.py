"""The ranks over which tensors are split, and what they exchange."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from meshwise.transfer import collectives


class Axis(Protocol):
    """Ranks that hold the parts of a tensor, and how they exchange them."""

    name: str
    size: int
    rank: int

    def all_reduce(self, tensor: Tensor, op: str = "sum") -> Tensor:
        """`tensor` reduced over the ranks, in place."""

    def all_gather(self, tensor: Tensor) -> Tensor:
        """`tensor` of every rank, stacked."""

    def meet(self, what: str) -> None:
        """Return when all ranks have come to exchange `what`."""


@dataclass(frozen=True)
class MeshAxis:
    """An axis of the device mesh. group: its ranks with this one among them."""

    name: str
    size: int
    rank: int
    group: collectives.Group

    def all_reduce(self, tensor: Tensor, op: str = "sum") -> Tensor:
        return collectives.all_reduce(tensor, op, self.group, of=self.name)

    def all_gather(self, tensor: Tensor) -> Tensor:
        return collectives.all_gather(tensor, self.group, of=self.name)

    def meet(self, what: str) -> None:
        """Nothing to do: all ranks of the axis run the same program on the same samples."""


@dataclass(frozen=True)
class Part:
    """Which part of a tensor a rank holds: of dim `dim`, whose whole length is `length`, as `torch.chunk` divides."""

    axis: Axis
    dim: int
    length: int

    @property
    def step(self) -> int:
        """The length of the first rank's part, which is the longest."""
        return -(-self.length // self.axis.size)

    @property
    def begin(self) -> int:
        """Where this rank's part begins."""
        return min(self.length, self.axis.rank * self.step)

    @property
    def own(self) -> int:
        """The length of this rank's part."""
        return min(self.length, self.begin + self.step) - self.begin

    @property
    def is_even(self) -> bool:
        """Whether all parts are of one length."""
        return self.length % self.axis.size == 0

    def slice_of(self, whole: Tensor) -> Tensor:
        """This rank's part of `whole`, a view."""
        return whole.narrow(self.dim, self.begin, self.own)

    def gathered(self, local: Tensor) -> Tensor:
        """The whole of what each rank has a part of. Collective."""
        step = self.step
        if self.own < step:
            pad = [0, 0] * (local.dim() - self.dim - 1) + [0, step - self.own]
            local = functional.pad(local, pad)
        parts = self.axis.all_gather(local.contiguous())
        whole = torch.cat(parts.unbind(0), self.dim)
        return whole if self.is_even else whole.narrow(self.dim, 0, self.length).contiguous()
