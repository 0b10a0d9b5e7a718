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
        """Return a sentence that says how the batches of the ranks differ.
        ranks: for each rank, what `told` has returned on that rank."""
        ...


class Carried(Protocol):
    """Checks that all ranks have equal settings and equal batches. Each rank sends a checksum of them along with its
    loss."""

    settings: Callable[[], tuple[Any, ...]]
    """Returns the settings of the program that must be equal on all ranks, such as learning rates."""
    batches: Batches | None
    rehearses: bool
    """Whether this is a rehearsal: tensors have no values, and other ranks are assumed to behave like this rank."""

    def signs(self, like: Tensor) -> Tensor:
        """Return a checksum of this rank's settings and batches, to send along with the loss. It has shape (n,), on the
        device of `like`."""
        ...

    def compare(self, means: Tensor, seen: Seen | None = None) -> None:
        """Check that settings and batches are equal on all ranks, by the checksums that the ranks have sent with a
        loss.

        means: averages over the ranks. First the average of the loss (or of the weighted loss and its weight), then the
            averages of the numbers that `signs` returned.
        seen: facts about the backward of the loss."""

    def compare_batches(self, parts: Sequence[tuple[Any, BatchSlice]], place: str) -> None:
        """Check that the ranks have equal settings and batches of equal shapes, in one of the first steps of a job.
        Collective, because a job sends no checksum along with its losses."""

    def finish(self) -> None:
        """Check the checksums that the ranks sent with the last loss of the program. They would otherwise be checked
        only with the next loss."""
