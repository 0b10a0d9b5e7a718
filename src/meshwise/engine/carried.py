"""Let guards send values along with a script's loss (agreed.py).

Tested in tests/guards/test_agreed.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor

from meshwise.data.order import BatchSlice

Seen: TypeAlias = tuple[int, int, BatchSlice | None, Tensor]
"""Facts about one backward: its number, its step's number, this rank's part of the batch, and this rank's loss."""


class Batches(Protocol):
    """The batches that a program has passed to `mw.split`, which must be equal on all ranks."""

    def checksum(self, device: torch.device) -> Tensor:
        """Return a checksum of all batches passed to `mw.split` so far, as an int64 scalar on `device`."""
        ...

    def take(self) -> list[Any]:
        """Return the batches passed to `mw.split` since `take` was last called."""
        ...

    def told(self, taken: list[Any]) -> Any:
        """Return a description of the batches in `taken`, to send to the other ranks."""
        ...

    def explain(self, ranks: list[Any]) -> str:
        """Return a sentence that says how the batches of the ranks differ. ranks: what `told` returned on each rank."""
        ...


class Carried(Protocol):
    """Compares values that must be equal on all ranks. A checksum of these values is sent along with each loss."""

    settings: Callable[[], tuple[Any, ...]]
    """Returns the settings of the program that must be equal on all ranks, such as learning rates."""
    batches: Batches | None
    rehearses: bool
    """Whether this is a rehearsal: tensors have no values, and other ranks are assumed to behave like this rank."""

    def signs(self, like: Tensor) -> Tensor:
        """Return a checksum of this rank's values, to be sent along with the loss, as a tensor of shape (n,) on the
        device of `like`."""
        ...

    def compare(self, means: Tensor, seen: Seen | None = None) -> None:
        """Compare the values of the ranks.

        means: the means over the ranks of the loss (or of the weighted loss and its weight), followed by the means of
        the numbers that were sent along.
        seen: facts about the backward of the loss."""

    def compare_batches(self, parts: Sequence[tuple[Any, BatchSlice]], place: str) -> None:
        """Compare the batches of the first steps of a job, in which no checksum is sent along with the loss.
        Collective."""

    def finish(self) -> None:
        """Compare the checksums that were sent along with the last loss, because no further loss follows."""
