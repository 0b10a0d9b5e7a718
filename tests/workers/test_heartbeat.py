"""What a rank tells of itself, and what its launcher reads of that."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from meshwise.reports import recorder as recorder_of
from meshwise.reports.recorder import Recorder
from meshwise.workers import heartbeat
from meshwise.workers.heartbeat import MOST_STEPS, Beat, Heartbeat, beat_path, read_beat


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return beat_path(tmp_path, 1)


def test_step_phase_and_steps_are_read_as_they_were_told(path: Path) -> None:
    beat = Heartbeat(path)
    for step in range(1, 7):
        beat.step(step)
        beat.phase("forward")
    told = read_beat(path)
    assert (told.step, told.phase, told.ours, len(told.steps)) == (6, "forward", False, 3)  # two are no measure
    beat.loop(ours=True, compiles=True)
    assert read_beat(path).ours and read_beat(path).compiles


def test_a_recorder_that_turns_beats_as_a_phase_does(path: Path) -> None:
    beat, recorder = Heartbeat(path), Recorder()
    recorder.pulse = beat
    for number, phase in enumerate(("data", "forward", "data"), 1):
        recorder.turn(phase)
        assert (read_beat(path).phase, read_beat(path).beats) == (phase, number)
    assert (recorder_of.BEATS, recorder_of.PHASE) == (heartbeat.BEATS, heartbeat.PHASE)


def test_every_beat_is_another_number(path: Path) -> None:
    beat, seen = Heartbeat(path), set()
    for tell in (lambda: beat.step(1), lambda: beat.phase("data"), lambda: beat.enter("barrier", "0,1/"),
                 lambda: beat.leave(beat.enter("barrier", "0,1/"))):  # fmt: skip
        seen.add(read_beat(path).beats)
        tell()
    assert len(seen | {read_beat(path).beats}) == 5


def test_what_lies_between_two_steps_is_no_step(path: Path) -> None:
    beat = Heartbeat(path)
    for step in range(1, 11):
        beat.step(step)
        if step == 5:
            beat.phase("evaluate")
    assert len(read_beat(path).steps) == 10 - 1 - 1 - 2
    for step in range(11, 11 + 2 * MOST_STEPS):
        beat.step(step)
    assert len(read_beat(path).steps) == MOST_STEPS


def test_a_rank_waits_in_its_oldest_collective_that_is_not_over(path: Path) -> None:
    beat = Heartbeat(path)
    first, second = beat.enter("all-reduce of gradients", "0,1/"), beat.enter("all-gather", "1,3/tensor")
    told = read_beat(path)
    assert told.waits_in is not None and (told.waits_in.name, told.waits_in.number) == ("all-reduce of gradients", 1)
    beat.leave(first)
    told = read_beat(path)
    assert told.waits_in is not None and told.waits_in.group == "1,3/tensor"
    beat.leave(second)
    assert read_beat(path).waits_in is None and read_beat(path).begun == {"0,1/": 1, "1,3/tensor": 1}


def test_more_groups_and_collectives_than_there_are_places_break_nothing(path: Path) -> None:
    beat = Heartbeat(path)
    for number in range(1000):
        beat.leave(beat.enter(f"kind {number % 90}", f"0,1/{number % 100}"))
    assert read_beat(path).waits_in is None
    beat.enter("the last", "0,1/0")
    told = read_beat(path)
    assert told.waits_in is not None and (told.waits_in.name, told.waits_in.number) == ("the last", 11)


def test_a_process_that_a_rank_forks_is_no_rank(path: Path) -> None:
    beat = Heartbeat(path)
    beat.phase("data")
    heartbeat.beat = beat
    try:
        if (pid := os.fork()) == 0:
            beat.phase("forward")
            heartbeat.enter("barrier", "0,1/")
            os._exit(0)
        os.waitpid(pid, 0)
        assert read_beat(path).phase == "data" and read_beat(path).begun == {}
    finally:
        heartbeat.beat = None


def test_nothing_is_told_where_no_launcher_looks_and_nothing_read_where_nobody_told(tmp_path: Path) -> None:
    assert heartbeat.beat is None
    heartbeat.leave(heartbeat.enter("barrier", "0,1/"))
    with heartbeat.watched_loop(compiles=False):
        pass
    assert read_beat(tmp_path / "none") == Beat()
