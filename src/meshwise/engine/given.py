"""Remember what a program passed to `mw.distribute`, beside models and optimizers.

Tested in tests/script/test_distribute.py.
"""

from __future__ import annotations

import weakref
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from meshwise.engine.split_batch import Splits


class CheckpointedLoop(Protocol):
    """What `mw.checkpoint` returns, as the engine sees it."""

    def step_ends(self, loader: Any) -> None:
        """Handle that the next batch of `loader` is asked for."""

    def epoch_ends(self, loader: Any, *, early: bool) -> None:
        """Handle that `loader` has no further batch in this epoch, or (early) that its loop was left."""

    def epoch_begins(self, loader: Any) -> None:
        """Handle that a loop over `loader` begins."""

    def keeps(self) -> list[Any]:
        """Return the program's objects that it saves."""

    def finishes_epoch(self) -> bool:
        """Return, when the run was asked to stop, whether the program should first reach its next epoch."""

    def stops(self) -> None:
        """Handle that the run was asked to stop."""

    def close(self) -> None:
        """Handle that the program ends."""


@dataclass(eq=False)
class Given:
    """schedulers: those given to `mw.distribute`. fed: weak references to the ones among them that are fed a number.
    loaders: those that it has made. loop_states: the saved states of the program's own loops. earlier: objects given by
    the programs before this one. splits: the batches that the program splits itself, once it has split one.

    saves, loads: how often each file was saved, and any was loaded: all ranks count the same, to meet there.
    """

    splits: Splits | None = None
    schedulers: weakref.WeakSet[LRScheduler] = field(default_factory=weakref.WeakSet)
    fed: list[weakref.ref[Any]] = field(default_factory=list)
    loaders: weakref.WeakSet[Any] = field(default_factory=weakref.WeakSet)
    saves: Counter[str] = field(default_factory=Counter)
    loads: int = 0
    loop_states: list[CheckpointedLoop] = field(default_factory=list)
    earlier: weakref.WeakSet[Any] = field(default_factory=weakref.WeakSet)

    def add_scheduler(self, scheduler: LRScheduler) -> None:
        """Add a scheduler that was given to `mw.distribute`."""
        if isinstance(scheduler, ReduceLROnPlateau) and scheduler not in self.schedulers:
            self.fed.append(weakref.ref(scheduler, self.fed.remove))
        self.schedulers.add(scheduler)

    def finishes_epoch(self) -> bool:
        """Return, when the run was asked to stop, whether the program should first reach its next epoch."""
        return any(state.finishes_epoch() for state in self.loop_states)

    def close(self) -> None:
        """Handle that the program ends."""
        for state in self.loop_states:
            state.close()
