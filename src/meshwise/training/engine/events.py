"""Define the events of a training loop, and call their listeners.

    batch_asked(loop)        the loop asks for its next batch, which may not exist
    batch_given(loop, batch) the loop has received this batch from its source
    backward_begins(loss, part, weight, reduction, where)
    backward_ends(mean, own) the global loss and this rank's own; None, None if the backward raised
    step_begins(optimizer)   an optimizer of the program begins its step
    step_ends(optimizer)
    loop_ends(loop)          the loop has ended, or the program has left it

`send` sends events outside of steps: data_given(data, samples, samplers), joined(value) for a value that was
reduced over the ranks, shown(place, text), in_stage(stage, microbatch), forward_ends(), program_begins(),
evaluations_end(), program_ends(), state_saved(saver, facts).

Listeners only observe. An event without listeners costs nothing. A listener may leave after its
probation: a number of backwards, which all ranks count alike, or in each loop a number of batches.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

EVENTS = ("batch_asked", "batch_given", "backward_begins", "backward_ends", "step_begins", "step_ends", "loop_ends")
Hear = Callable[..., None]


class When(enum.IntEnum):
    """The position of a listener in the order of calls at an event. The order is reversed at events that end something,
    such as a backward."""

    GUARD = 1  # first: refuses a step before another listener changes anything
    WATCH = 2  # sees gradients before the step, and the parameters of all ranks after it
    PHASE = 3  # innermost, so that a phase does not include the time of other listeners


@dataclass(eq=False)
class Probation:
    """A listener of an engine's events, and for how long it is called."""

    listener: object
    when: When
    only: tuple[str, ...]
    backwards: float
    batches: float
    anew: Callable[[], None] | None
    whole: tuple[str, ...]
    ends: float = math.inf  # the listener is called until the program has run this many backwards


class OfLoop(NamedTuple):
    """The listeners' methods to call at the next batches of a loop."""

    state: object
    due: float
    asked: tuple[Hear, ...]
    given: tuple[Hear, ...]


class Events:
    """The listeners of an engine. For each event, a tuple holds the methods to call."""

    backward_begins: tuple[Hear, ...] = ()
    backward_ends: tuple[Hear, ...] = ()
    step_begins: tuple[Hear, ...] = ()
    step_ends: tuple[Hear, ...] = ()
    loop_ends: tuple[Hear, ...] = ()
    due: float = math.inf
    """After this many backwards of the program, a listener expires. `tell` must then be called to remove it."""
    state: object = None
    """Replaced when the listeners change, so that a loop notices that its `OfLoop` is outdated."""

    def __init__(self, backwards: Callable[[], int]) -> None:
        """backwards: returns the number of backwards so far."""
        self._all: list[Probation] = []
        self._backwards = backwards

    def listen(
        self,
        listener: object,
        when: When = When.GUARD,
        *,
        only: tuple[str, ...] = EVENTS,
        backwards: float = math.inf,
        batches: float = math.inf,
        anew: Callable[[], None] | None = None,
        whole: tuple[str, ...] | None = None,
    ) -> None:
        """Call the methods of `listener` that are named like events, at these events."""
        kept = tuple(name for name in only if hasattr(listener, name))
        then, ends = kept if whole is None else whole, self._backwards() + backwards
        self._all.append(Probation(listener, when, kept, backwards, batches, anew, then, ends))
        self._all.sort(key=lambda each: each.when)
        self.tell()

    def leave(self, listener: object) -> None:
        """Remove a listener."""
        self._all = [each for each in self._all if each.listener is not listener]
        self.tell()

    def see_whole(self, *, alone: bool) -> None:
        """Adapt the listeners to a program that sees whole batches. alone: on one device, which needs no guard."""
        self._all = [each for each in self._all if each.when != When.GUARD or (each.whole != () and not alone)]
        for each in self._all:
            each.only = each.whole
        self.tell()

    def send(self, event: str, *facts: Any) -> None:
        """Call the method `event` of every listener that has it, at an event outside of steps."""
        for each in self._all:
            if (hear := getattr(each.listener, event, None)) is not None:
                hear(*facts)

    def begins(self) -> None:
        """Count the `backwards` of each listener from 0 again, and call the listener's function `anew`."""
        for each in self._all:
            each.ends = self._backwards() + each.backwards
            if each.anew is not None:
                each.anew()
        self.tell()

    def tell(self) -> None:
        """Update the tuples of methods to call at each event, after a listener was added or removed."""
        now = self._hearing()
        for event in EVENTS[2:]:
            heard = _heard(now, event)
            setattr(self, event, heard[::-1] if event.endswith("_ends") else heard)
        self.due = min((each.ends for each in now), default=math.inf)
        self.state = object()

    def of_loop(self, given: int) -> OfLoop:
        """Return the listeners' methods to call at the next batches of a loop."""
        now = [each for each in self._hearing() if each.batches > given]
        due = min((each.batches for each in now), default=math.inf)
        return OfLoop(self.state, due, _heard(now, "batch_asked"), _heard(now, "batch_given"))

    def _hearing(self) -> list[Probation]:
        over = self._backwards()
        return [each for each in self._all if each.ends > over]


def _heard(listeners: list[Probation], event: str) -> tuple[Hear, ...]:
    return tuple(getattr(each.listener, event) for each in listeners if event in each.only)
