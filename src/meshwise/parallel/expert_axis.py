"""Exchange rows among the ranks that divide the experts.

Tested in tests/parallel/test_experts.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor
from torch.autograd.function import Function

from meshwise.transfer import collectives


class ExpertAxis(Protocol):
    """The ranks over which experts are divided, with the collectives between them."""

    @property
    def size(self) -> int: ...

    @property
    def rank(self) -> int: ...

    def all_gather(self, tensor: Tensor) -> Tensor:
        """Gather `tensor` from every rank, stacked in rank order."""

    def exchange(self, sent: Sequence[Tensor], taken: Sequence[Tensor]) -> None:
        """Send `sent[r]` to rank r and receive `taken[r]` from rank r. Each of these tensors may have no rows."""


@dataclass(frozen=True)
class ExpertMeshAxis:
    """The ranks of the mesh axis over which experts are divided.

    group: the process group of all ranks that differ from this rank only on this axis. Together they hold all experts.
    """

    size: int
    rank: int
    group: collectives.Group

    def all_gather(self, tensor: Tensor) -> Tensor:
        return collectives.all_gather(tensor, self.group, of="tokens of experts")

    def exchange(self, sent: Sequence[Tensor], taken: Sequence[Tensor]) -> None:
        taken[self.rank].copy_(sent[self.rank])
        sends = [(rows, r) for r, rows in enumerate(sent) if r != self.rank and len(rows)]
        receives = [(rows, r) for r, rows in enumerate(taken) if r != self.rank and len(rows)]
        if sends or receives:
            collectives.send_receive(sends, receives, self.group, "all-to-all")


def exchanged(
    axis: ExpertAxis, sent: list[int], taken: list[int], scale: float, *tensors: Tensor
) -> tuple[Tensor, ...]:
    """Exchange rows with the other ranks of the axis, and return the received rows of each tensor. The backward sends
    the gradients of the received rows back.

    sent: how many rows of each tensor go to each rank. The first rows go to rank 0, the next rows to rank 1, and so on.
    taken: the number of rows to receive from each rank.
    scale: multiplies the gradients in the backward.
    tensors: the tensors whose rows are sent.
    """
    function: Any = _Exchange
    found: tuple[Tensor, ...] = function.apply(axis, sent, taken, scale, *tensors)
    return found


class _Exchange(Function):
    """Sends rows to the ranks of their experts, or sends results back.

    sent: the number of rows to send to each rank.
    taken: the number of rows to receive from each rank.
    scale: a factor that multiplies the gradients in the backward.
    """

    @staticmethod
    def forward(
        ctx: Any, axis: ExpertAxis, sent: list[int], taken: list[int], scale: float, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.facts = axis, sent, taken, scale
        found = []
        for rows in tensors:
            into = rows.new_empty((sum(taken), *rows.shape[1:]))
            axis.exchange(rows.contiguous().split(sent), into.split(taken))
            found.append(into)
        return tuple(found)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        axis, sent, taken, scale = ctx.facts
        needed = [g * scale for g, wanted in zip(gradients, ctx.needs_input_grad[4:], strict=True) if wanted]
        back = iter(exchanged(axis, taken, sent, 1 / scale, *needed))
        return None, None, None, None, *(next(back) if wanted else None for wanted in ctx.needs_input_grad[4:])
