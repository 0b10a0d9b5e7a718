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
    """The object that `mw.checkpoint` returns, with the methods that the engine calls."""

    def step_ends(self, loader: Any) -> None:
        """Record that the program asks for the next batch of `loader`, and so has finished a step."""

    def epoch_ends(self, loader: Any, *, early: bool) -> None:
        """Record that `loader` has no further batch in this epoch. early: the program has left the loop before its last
        batch."""

    def epoch_begins(self, loader: Any) -> None:
        """Record that a loop over `loader` begins."""

    def keeps(self) -> list[Any]:
        """Return the program's objects that the checkpoint saves."""

    def finishes_epoch(self) -> bool:
        """Return whether the program should continue until its next epoch, although the run was asked to stop."""

    def stops(self) -> None:
        """Save the state if possible, because the run was asked to stop."""

    def close(self) -> None:
        """Finish all saves, as the program ends."""


@dataclass(eq=False)
class Given:
    """The objects that the program gave to `mw.distribute`, except its models and optimizers.

    splits: the batches passed to `mw.split`; None until its first call.
    schedulers: the learning rate schedulers.
    fed: weak references to the schedulers with a `step` that takes a metric.
    loaders: the distributed loaders.
    loop_states: the objects that `mw.checkpoint` returned.
    earlier: objects that were given by earlier programs in this process.
    waits: whether the program accumulates gradients and is not at the last batch of the step, in a loop that cannot
    save these gradients.
    saves: how often each file was saved. The counts are equal on all ranks, so ranks can use them to wait for the same
    save.
    loads: how often a file was loaded, counted like `saves`."""

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
        """Return whether the program should continue until its next step or epoch, although the run was asked to
        stop."""
        return self.waits or any(state.finishes_epoch() for state in self.loop_states)

    def close(self) -> None:
        """Finish the saves of all objects that `mw.checkpoint` returned, as the program ends."""
        for state in self.loop_states:
            state.close()
