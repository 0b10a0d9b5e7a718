"""Who hears what happens in a training loop, and for how long.

Steps are tested in whole programs (training/engine/steps.py). What listens is tested with what it says:
training/guards/registry.py, training/engine/engine.py and
training/guards/loss_looks.py.
"""

import math
from typing import Any

from meshwise.training.engine.events import EVENTS, Events, When


class Ear:
    """Hears some events, and writes them down."""

    def __init__(self, name: str, heard: list[str], *events: str) -> None:
        for event in events:
            setattr(self, event, lambda *_, event=event: heard.append(f"{name} {event}"))


def tell(events: Events, event: str) -> None:
    for hear in getattr(events, event):
        hear()


def test_there_are_seven_events_and_one_that_nobody_hears_is_an_empty_tuple() -> None:
    events = Events(lambda: 0)
    assert len(EVENTS) == 7
    assert not any((events.backward_begins, events.backward_ends, events.step_begins, events.step_ends))
    assert events.due == math.inf and events.of_loop(0)[2:] == ((), ())


def test_what_begins_is_heard_in_order_and_what_ends_in_the_reverse() -> None:
    heard: list[str] = []
    events = Events(lambda: 0)
    both = ("step_begins", "step_ends")
    events.listen(Ear("phases", heard, *both), When.PHASE)
    events.listen(Ear("first guard", heard, *both))
    events.listen(Ear("watcher", heard, *both), When.WATCH)
    events.listen(Ear("second guard", heard, "step_begins"))
    tell(events, "step_begins")
    assert [text.removesuffix(" step_begins") for text in heard] == ["first guard", "second guard", "watcher", "phases"]
    heard.clear()
    tell(events, "step_ends")
    assert heard == ["phases step_ends", "watcher step_ends", "first guard step_ends"]


def test_a_probation_ends_after_so_many_backwards_and_begins_anew() -> None:
    heard: list[str] = []
    done, anew = [0], [0]
    events = Events(lambda: done[0])

    def again() -> None:
        anew[0] += 1

    events.listen(Ear("guard", heard, "backward_begins"), backwards=3, anew=again)
    for _ in range(5):
        tell(events, "backward_begins")
        done[0] += 1
        if done[0] >= events.due:
            events.tell()
    assert len(heard) == 3 and events.backward_begins == () and events.due == math.inf
    events.begins()
    assert anew == [1] and events.due == 8 and len(events.backward_begins) == 1


def test_guards_of_ranks_leave_a_program_that_sees_whole_batches() -> None:
    heard: list[str] = []
    for alone in (False, True):
        events = Events(lambda: 0)
        events.listen(Ear("of ranks", heard, "loop_ends"), whole=())
        both = Ear("of both", heard, "loop_ends", "backward_ends")
        events.listen(both, only=("loop_ends",), whole=("backward_ends",))
        events.listen(Ear("watcher", heard, "loop_ends"), When.WATCH)
        events.see_whole(alone=alone)
        tell(events, "loop_ends")
        tell(events, "backward_ends")
    assert heard == ["watcher loop_ends", "of both backward_ends", "watcher loop_ends"]


def test_what_happens_outside_of_steps_is_sent_to_who_has_a_method_for_it() -> None:
    heard: list[str] = []
    events = Events(lambda: 0)
    events.listen(Ear("one", heard, "program_ends"))
    events.listen(Ear("other", heard, "loop_ends"))
    events.send("program_ends", 1, 2)
    assert heard == ["one program_ends"]


def test_who_looks_at_the_first_batches_of_a_loop_hears_those_of_each_loop() -> None:
    heard: list[str] = []
    events = Events(lambda: 0)
    events.listen(Ear("short", heard, "batch_asked", "batch_given"), batches=2)
    events.listen(Ear("long", heard, "batch_given"))
    before = events.of_loop(0)
    assert before.due == 2 and len(before.asked) == 1 and len(before.given) == 2
    assert events.of_loop(1)[1:] == before[1:]
    later = events.of_loop(2)
    assert later.due == math.inf and later.asked == () and len(later.given) == 1


def test_somebody_who_comes_or_leaves_in_the_middle_of_a_loop_is_noticed() -> None:
    events = Events(lambda: 0)
    ear: Any = Ear("one", [], "batch_given")
    before = events.of_loop(0)
    events.listen(ear)
    assert before.state is not events.state and events.of_loop(0).given == (ear.batch_given,)
    events.leave(ear)
    assert events.of_loop(0).given == ()
