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
    """What `mw.checkpoint` returns, with the methods that the engine calls."""

    def step_ends(self, loader: Any) -> None:
        """Record that the program asks for the next batch of `loader`: a step is over."""

    def epoch_ends(self, loader: Any, *, early: bool) -> None:
        """Record that `loader` has no further batch in this epoch, or (early) that the program left its loop."""

    def epoch_begins(self, loader: Any) -> None:
        """Record that a loop over `loader` begins."""

    def keeps(self) -> list[Any]:
        """Return the program's objects that the checkpoint saves."""

    def finishes_epoch(self) -> bool:
        """Return, once the run was asked to stop, whether the program should go on until its next epoch."""

    def stops(self) -> None:
        """React to the request that the run stops."""

    def close(self) -> None:
        """Finish, as the program ends."""


@dataclass(eq=False)
class Given:
    """What the program gave to `mw.distribute`. schedulers: the schedulers. fed: weak references to those of them that
    step by a metric. loaders: the distributed loaders. loop_states: what `mw.checkpoint` returned. earlier: objects
    given by earlier programs in this process. splits: the batches of `mw.split`, once it is called.

    waits: whether batches of a step wait for their last one, in a loop whose state cannot hold their gradients.
    saves, loads: how often each file was saved, and files were loaded; all ranks count alike, to synchronize.
    """

    splits: Splits | None = None
    schedulers: weakref.WeakSet[LRScheduler] = field(default_factory=weakref.WeakSet)
    fed: list[weakref.ref[Any]] = field(default_factory=list)
    loaders: weakref.WeakSet[Any] = field(default_factory=weakref.WeakSet)
    saves: Counter[str] = field(default_factory=Counter)
    loads: int = 0
    waits: bool = False
    loop_states: list[CheckpointedLoop] = field(default_factory=list)
    earlier: weakref.WeakSet[Any] = field(default_factory=weakref.WeakSet)

    def add_scheduler(self, scheduler: LRScheduler) -> None:
        """Add a scheduler that was given to `mw.distribute`."""
        if isinstance(scheduler, ReduceLROnPlateau) and scheduler not in self.schedulers:
            self.fed.append(weakref.ref(scheduler, self.fed.remove))
        self.schedulers.add(scheduler)

    def finishes_epoch(self) -> bool:
        """Return, once the run was asked to stop, whether the program should go on until its next step or epoch."""
        return self.waits or any(state.finishes_epoch() for state in self.loop_states)

    def close(self) -> None:
        """Close the saved states of loops, as the program ends."""
        for state in self.loop_states:
            state.close()
