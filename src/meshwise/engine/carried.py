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
"""Facts about a backward: its number, its step, this rank's part of the batch, and this rank's loss."""


class Batches(Protocol):
    """The batches of `mw.split`, which all ranks must hold alike."""

    def checksum(self, device: torch.device) -> Tensor:
        """Return a checksum of all batches so far: an int64 scalar on `device`."""
        ...

    def take(self) -> list[Any]:
        """Return the batches given since the last call."""
        ...

    def told(self, taken: list[Any]) -> Any:
        """Return what the other ranks need to know of the batches in `taken`."""
        ...

    def explain(self, ranks: list[Any]) -> str:
        """Return a sentence on how the ranks' batches differ."""
        ...


class Carried(Protocol):
    """Compares values of the ranks that must be equal."""

    settings: Callable[[], tuple[Any, ...]]
    """Returns settings of the program that must be the same on all ranks."""
    batches: Batches | None
    rehearses: bool
    """Whether this is a rehearsal: tensors have no values, and other ranks are assumed to do what this one does."""

    def signs(self, like: Tensor) -> Tensor:
        """Return a checksum of this rank's values as numbers to send along with `like`: shape (n,)."""
        ...

    def compare(self, means: Tensor, seen: Seen | None = None) -> None:
        """Compare the ranks by `means`: the means over ranks of the loss, or of its sum and weight, and then of the
        numbers sent along. seen: facts about the loss's backward."""

    def compare_batches(self, parts: Sequence[tuple[Any, BatchSlice]], place: str) -> None:
        """Compare the batches of a job's first steps, whose losses carry no checksum. Collective."""

    def finish(self) -> None:
        """Check what is left to compare: no further loss comes."""
