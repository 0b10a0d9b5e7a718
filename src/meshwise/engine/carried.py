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
"""A backward: its number, its step, this rank's part of the batch, and this rank's own loss."""


class Batches(Protocol):
    """Batches that all ranks were given (`mw.split`)."""

    def checksum(self, device: torch.device) -> Tensor:
        """Of all batches so far, an int64 scalar on the device."""
        ...

    def take(self) -> list[Any]:
        """The batches since the last time."""
        ...

    def told(self, taken: list[Any]) -> Any:
        """What the other ranks learn of them."""
        ...

    def explain(self, ranks: list[Any]) -> str:
        """How the ranks differ: one sentence."""
        ...


class Carried(Protocol):
    """Compares what the ranks hold."""

    settings: Callable[[], tuple[Any, ...]]
    """What of the program must be alike on all ranks."""
    batches: Batches | None
    rehearses: bool
    """Whether tensors have no values, and the other ranks do what this one does."""

    def signs(self, like: Tensor) -> Tensor:
        """Numbers that travel with `like`: shape (n,)."""
        ...

    def compare(self, means: Tensor, seen: Seen | None = None) -> None:
        """The means over the ranks have come: of the loss, or of its sum and weight, where `seen` tells of which, and
        of the numbers behind it."""

    def compare_batches(self, parts: Sequence[tuple[Any, BatchSlice]], place: str) -> None:
        """Of the first steps of a job, whose losses carry nothing. Collective."""

    def finish(self) -> None:
        """No loss comes any more."""
