"""The recorder: spans as they happened, drained from elsewhere, and the phase in which an error came."""

import threading
from itertools import count
from typing import Any

import pytest
import torch

from meshwise.reports.recorder import CAPACITY, WIDTH, Recorder, current, make_current


@pytest.fixture
def recorder() -> Recorder:
    """A recorder whose clock goes on by 1 ns at each reading."""
    ticks = count()
    return Recorder(clock=lambda: next(ticks))


def drained(recorder: Recorder) -> list[tuple[Any, ...]]:
    """(kind, name, start, end, step, bytes, collective) of what was recorded."""
    rows, _ = recorder.drain()
    spans = [rows[at : at + WIDTH] for at in range(0, len(rows), WIDTH)]
    return [(recorder.names[code][0], recorder.names[code][2], *rest) for code, *rest in spans]


def test_a_span_has_its_kind_its_times_and_its_step(recorder: Recorder) -> None:
    with recorder.span("data", "read"):
        pass
    recorder.begin_step(7)
    with recorder.span("forward"):
        pass
    assert drained(recorder) == [("data", "read", 0, 1, 0, 0, -1), ("forward", "", 2, 3, 7, 0, -1)]
    assert drained(recorder) == []


def test_collectives_have_the_number_in_which_the_rank_entered_them(recorder: Recorder) -> None:
    code = recorder.code("communication", "all-reduce", "communication")
    first, second = recorder.arrive(), recorder.arrive()
    recorder.add(code, 5, 9, 64, second)
    recorder.add(code, 4, 8, 64, first)
    with recorder.collective("barrier", 0):
        pass
    assert [row[-1] for row in drained(recorder)] == [1, 0, 2]


def test_numbers_of_collectives_go_on_while_nothing_is_recorded(recorder: Recorder) -> None:
    recorder.on = False
    recorder.arrive()
    recorder.on = True
    assert recorder.arrive() == 1


def test_a_recorder_that_is_off_records_nothing_and_still_names_the_phase(recorder: Recorder) -> None:
    recorder.on = False
    with recorder.span("forward"):
        assert recorder.phase == "forward"
    recorder.count("loss", 1.0)
    assert recorder.drain() == ([], [])


def test_after_an_error_the_phase_stays(recorder: Recorder) -> None:
    with pytest.raises(ZeroDivisionError), recorder.span("backward"):
        raise ZeroDivisionError
    assert recorder.phase == "backward" and len(drained(recorder)) == 1


def test_an_unknown_kind_is_refused(recorder: Recorder) -> None:
    with pytest.raises(ValueError, match="kind 'lunch' or lane"):
        recorder.span("lunch")


def test_memory_is_taken_at_the_phases_of_the_first_step_and_of_that_after_it_was_wanted(recorder: Recorder) -> None:
    recorder.memory = lambda: {"resident": 42}
    for step in (1, 2, 3, 4):
        recorder.begin_step(step)
        if step == 2:
            recorder.request_memory()
        for phase in ("forward", "backward"):
            with recorder.span(phase):
                pass
    _, counters = recorder.drain()
    assert [(step, name, value) for _, step, _, name, value in counters] == [
        (step, "resident", 42) for step in (1, 1, 3, 3)
    ]


def test_when_nobody_drains_the_oldest_spans_go_and_are_counted(recorder: Recorder) -> None:
    code = recorder.code("data")
    for number in range(CAPACITY + 1):
        recorder.add(code, number, number)
    recorder.begin_step(1)
    rows, _ = recorder.drain()
    assert recorder.dropped == CAPACITY // 2 and len(rows) == WIDTH * (CAPACITY + 1 - recorder.dropped)
    assert rows[1] == recorder.dropped


def test_spans_added_while_another_thread_drains_are_never_lost() -> None:
    recorder, taken, done = Recorder(), [], threading.Event()

    def drain() -> None:
        while not done.is_set():
            taken.extend(recorder.drain()[0])

    thread = threading.Thread(target=drain)
    thread.start()
    code = recorder.code("data")
    for number in range(50_000):
        recorder.add(code, number, number)
    done.set()
    thread.join()
    taken += recorder.drain()[0]
    assert taken[1::WIDTH] == list(range(50_000))


def test_other_profilers_see_the_phases_while_they_run(recorder: Recorder) -> None:
    with recorder.span("data"):
        pass
    with torch.profiler.profile() as profile, recorder.span("forward"):
        torch.ones(2) + 1
    names = {event.key for event in profile.key_averages()}
    assert "meshwise.forward" in names and "meshwise.data" not in names


def test_a_process_has_one_recorder() -> None:
    before, mine = current(), Recorder()
    assert not before.on
    assert make_current(mine) is before and current() is mine
    make_current(before)
