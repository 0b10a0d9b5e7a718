"""What an engine tells the state of a loop of one's own (checkpoint.py).

Tested in tests/training/test_saved_loop.py.
"""

from __future__ import annotations

from typing import Any, Protocol


class LoopState(Protocol):
    """What `mw.checkpoint` has made."""

    def step_ends(self, loader: Any) -> None:
        """The next batch of `loader` is asked for."""

    def epoch_ends(self, loader: Any, *, early: bool) -> None:
        """There is no further batch of `loader` in this epoch, or (early) its loop was left."""

    def epoch_begins(self, loader: Any) -> None:
        """A loop over `loader` begins."""

    def keeps(self) -> list[Any]:
        """The program's things that it saves."""

    def finishes_epoch(self) -> bool:
        """The run was asked to stop: whether the program first comes to its next epoch."""

    def stops(self) -> None:
        """The run was asked to stop."""

    def close(self) -> None:
        """The program ends."""
