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
"""Facts about a backward: its number, its step, this rank's part of the batch, and this rank's own loss."""


class Batches(Protocol):
    """Batches that all ranks were given (`mw.split`)."""

    def checksum(self, device: torch.device) -> Tensor:
        """Return a checksum of all batches so far, an int64 scalar on the device."""
        ...

    def take(self) -> list[Any]:
        """Return the batches since the last call."""
        ...

    def told(self, taken: list[Any]) -> Any:
        """Return what the other ranks need to know of these batches."""
        ...

    def explain(self, ranks: list[Any]) -> str:
        """Say in one sentence how the ranks differ."""
        ...


class Carried(Protocol):
    """Compares values of the ranks."""

    settings: Callable[[], tuple[Any, ...]]
    """Settings of the program that must be the same on all ranks."""
    batches: Batches | None
    rehearses: bool
    """Whether tensors have no values, and the other ranks are assumed to do what this one does."""

    def signs(self, like: Tensor) -> Tensor:
        """Return numbers to send along with `like`: shape (n,)."""
        ...

    def compare(self, means: Tensor, seen: Seen | None = None) -> None:
        """Compare the means over the ranks, now that they are known: of the loss, or of its sum and weight (`seen`
        tells of which loss), and of the numbers sent along."""

    def compare_batches(self, parts: Sequence[tuple[Any, BatchSlice]], place: str) -> None:
        """Compare the batches of a job's first steps, whose losses carry nothing. Collective."""

    def finish(self) -> None:
        """Finish: no further loss comes."""
