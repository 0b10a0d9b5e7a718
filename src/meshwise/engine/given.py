"""Remember what a program passed to `mw.distribute`, beside models and optimizers.

Tested in tests/script/test_distribute.py.
"""

from __future__ import annotations

import weakref
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from meshwise.engine.model_stream import ModelStream


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
        """Return whether a run that is asked to stop must first finish its step (see `waits`) or its epoch (see
        `CheckpointedLoop.finishes_epoch`)."""

    def stops(self) -> None:
        """Save the state if possible, because the run was asked to stop."""

    def close(self) -> None:
        """Finish all saves, as the program ends."""


@dataclass(eq=False)
class Given:
    """The objects that the program gave to `mw.distribute`, except its models and optimizers.

    stream: the random numbers of models, in a program by rank that has called `mw.split`; else None.
    schedulers: the learning rate schedulers.
    fed: weak references to the schedulers with a `step` that takes a metric, e.g. ReduceLROnPlateau.
    loaders: the distributed loaders.
    loop_states: the objects that `mw.checkpoint` returned.
    earlier: objects that were given by earlier programs in this process.
    waits: True in the middle of a Lightning step that takes several batches. A run that is asked to stop finishes such
        a step first, because Lightning does not save its gradients.
    saves: how often each file was saved. The counts are equal on all ranks, so they name the same save on every rank.
    loads: how often a file was loaded. The count is equal on all ranks."""

    stream: ModelStream | None = None
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
        """Return whether the program should continue although the run was asked to stop. If so, it must first finish
        its step (see `waits`) or its epoch (see `CheckpointedLoop.finishes_epoch`)."""
        return self.waits or any(state.finishes_epoch() for state in self.loop_states)

    def close(self) -> None:
        """Finish the saves of all objects that `mw.checkpoint` returned, as the program ends."""
        for state in self.loop_states:
            state.close()
