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


@dataclass(eq=False)
class Given:
    """schedulers: those that were given to `mw.distribute`. fed: of these, what is given a number; weak references.
    loaders: those that it has made. loop_states: what is saved of the program's own loops. earlier: what the programs
    before this one had given. splits: the batches that the program splits itself, once it has split one.

    saves, loads: how often each file was saved, and any was loaded: ranks count alike, to meet there.
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
        """One that was given to `mw.distribute`."""
        if isinstance(scheduler, ReduceLROnPlateau) and scheduler not in self.schedulers:
            self.fed.append(weakref.ref(scheduler, self.fed.remove))
        self.schedulers.add(scheduler)

    def finishes_epoch(self) -> bool:
        """The run was asked to stop: whether the program first comes to its next epoch."""
        return any(state.finishes_epoch() for state in self.loop_states)

    def close(self) -> None:
        """The program ends."""
        for state in self.loop_states:
            state.close()
