"""A rank that does not go on: who is named, after how long, and where it stands (workers/hang.py, workers/stuck.py)."""

from __future__ import annotations

import faulthandler
import os
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from meshwise.workers import hang
from meshwise.workers.hang import FEW, HangWatch, find_stall, patience
from meshwise.workers.heartbeat import PEERS, SIGNAL, Beat, CollectiveCall, Heartbeat, beat_path
from meshwise.workers.stuck import standing, stuck_child

STEPS = [0.005] * 99 + [0.1]
ALL = "0,1,2/"


def at(number: int, group: str = ALL, name: str = "all-reduce of gradients") -> CollectiveCall:
    return CollectiveCall(name, group, number, time.perf_counter_ns())


def waits(number: int, group: str = ALL, **more: object) -> Beat:
    begun = {group: number} if not group.endswith(PEERS) else {}
    return Beat(1, 40, "backward", steps=STEPS, begun=begun, waits_in=at(number, group), **more)  # type: ignore[arg-type]


def works(number: int, group: str = ALL, phase: str = "forward", **more: object) -> Beat:
    return Beat(1, 40, phase, steps=STEPS, begun={group: number}, **more)  # type: ignore[arg-type]


def test_the_rank_for_which_others_wait_is_named() -> None:
    stall = find_stall({0: waits(8), 1: works(7), 2: waits(8)}, [0, 1, 2])
    assert stall is not None and stall.ranks == [1] and sorted(stall.waiting) == [0, 2]
    assert stall.collective is not None and stall.collective.number == 8


def test_a_rank_that_goes_on_hangs_nobody() -> None:
    assert find_stall({0: waits(8), 1: works(7)}, [0]) is None


def test_a_rank_that_waits_for_another_is_not_blamed() -> None:
    beats = {0: waits(3, "0,1/"), 1: waits(9, "1,2/"), 2: works(8, "1,2/")}
    stall = find_stall(beats, [0, 1, 2])
    assert stall is not None and stall.ranks == [2] and sorted(stall.waiting) == [1]


def test_the_other_end_of_a_receive_is_named() -> None:
    stall = find_stall({0: works(5), 1: waits(1, f"0/{PEERS}")}, [0, 1])
    assert stall is not None and stall.ranks == [0]


def test_ranks_in_different_collectives_are_told_from_one_that_is_late() -> None:
    stall = find_stall({0: waits(3, "0,1/a"), 1: waits(4, "0,1/b")}, [0, 1])
    assert stall is not None and stall.crossed and stall.ranks == [0, 1]


def test_a_collective_that_all_have_come_to_and_that_does_not_end() -> None:
    stall = find_stall({0: waits(8, "0,1/"), 1: waits(8, "0,1/")}, [0, 1])
    assert stall is not None and stall.inside


def test_a_collective_that_does_not_end_is_the_cause_of_the_others_that_wait() -> None:
    beats = {0: waits(9, "0,1,2,3/"), 1: waits(9, "0,1,2,3/"), 2: waits(4, "2,3/"), 3: waits(4, "2,3/")}
    stall = find_stall(beats, [0, 1, 2, 3])
    assert stall is not None and stall.inside and stall.ranks == [2, 3] and stall.collective == beats[2].waits_in
    named = hang._of_stopped(stall, [3])
    assert named.ranks == [3] and sorted(named.waiting) == [0, 1, 2] and not named.inside


def test_a_collective_that_does_not_end_is_the_cause_of_those_who_wait_where_nobody_sees() -> None:
    beats = {0: waits(4, "0,1/"), 1: waits(4, "0,1/"), 2: works(7, "2,3/"), 3: works(7, "2,3/")}
    assert find_stall(beats, [0, 1, 2, 3]) is None  # a script may compute
    stall = find_stall({rank: replace(beat, ours=True) for rank, beat in beats.items()}, [0, 1, 2, 3])
    assert stall is not None and stall.inside and stall.ranks == [0, 1]


def message(source: int, **more: object) -> Beat:
    """A rank of a pipeline that waits for what `source` sends."""
    return replace(waits(1, f"{source}/{PEERS}"), ours=True, phase="idle", **more)  # type: ignore[arg-type]


def test_two_ends_of_which_each_waits_for_the_other_are_told() -> None:
    stall = find_stall({0: message(1, begun={"1/>": 1}), 1: message(0, begun={"0/>": 1})}, [0, 1])
    assert stall is not None and stall.crossed and stall.ranks == [0, 1]


def test_silence_of_all_ranks_is_a_hang_in_a_job_alone() -> None:
    beats = {0: works(7), 1: works(7)}
    assert find_stall(beats, [0, 1]) is None
    stall = find_stall({rank: replace(beat, ours=True) for rank, beat in beats.items()}, [0, 1])
    assert stall is not None and stall.ranks == [0, 1] and not stall.waiting


def test_on_an_accelerator_who_has_come_to_fewer_collectives_is_late() -> None:
    ahead = works(8, overlaps=True, recent=[at(7), at(8)])
    stall = find_stall({0: ahead, 1: works(7, overlaps=True, recent=[at(7)])}, [0, 1])
    assert stall is not None and stall.ranks == [1] and sorted(stall.waiting) == [0]
    assert find_stall({0: ahead, 1: ahead}, [0, 1]) is None


def test_what_may_take_how_long() -> None:
    ask, end = patience(works(7), {}, 60.0)
    assert ask == pytest.approx(3 * max(STEPS) + 2) and end == 60
    for beat in (
        replace(works(7), steps=STEPS[: FEW - 1]),
        replace(works(7), compiles=True),
        works(7, phase="checkpoint"),
    ):
        assert patience(beat, {}, 60.0) == (60, 600)
        assert patience(beat, {}, 60.0, stopped=True) == (5, 60)
        assert patience(beat, {}, 4.0, stopped=True) == (5, 5)
    assert patience(works(7, phase="evaluate"), {"evaluate": 20.0}, 60.0) == (90, 180)
    assert patience(works(7, phase="evaluate"), {}, 8.0) == (4, 8)  # as the user has asked for
    assert patience(works(7, phase="evaluate"), {"evaluate": 2.0}, 8.0) == (10, 20)
    assert patience(works(7), {}, 60.0, stopped=True) == (ask, 60)
    assert patience(works(7), {}, 1.0)[1] == ask  # never ended before it is told of


class Ranks:
    """Ranks that beat into a folder, and a clock that a test moves."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, limit: float | None) -> None:
        self.now = 0.0
        monkeypatch.setattr(hang.time, "monotonic", lambda: self.now)
        self.beats = [Heartbeat(beat_path(folder, rank)) for rank in (0, 1)]
        self.watch = HangWatch(folder, limit)
        for step in range(1, 10):
            for beat in self.beats:
                beat.step(step)
                beat.phase("forward")
                beat.leave(beat.enter("all-reduce of gradients", "0,1/"))

    def told(self, seconds: float, step: float = 0.25) -> list[hang.Hang]:
        found = []
        for _ in range(round(seconds / step)):
            self.now += step
            found.append(self.watch.look({0: None, 1: None}))
        return [each for each in found if each]


@pytest.fixture
def ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Ranks]:
    return lambda limit=None: Ranks(tmp_path, monkeypatch, limit)


def test_a_hang_is_told_once_and_its_end_too(ranks: Callable[..., Ranks]) -> None:
    two = ranks()
    two.beats[0].enter("all-reduce of gradients", "0,1/")
    (hung,) = two.told(100)
    assert hung.rank == 1 and not hung.over
    assert hung.text.startswith("No progress for 2.") and "in step 9: rank 1 is in its phase forward" in hung.text
    assert "rank 0 waits for it in all-reduce of gradients (collective 10)" in hung.text
    two.beats[1].step(10)
    (on,) = two.told(1)
    assert on.text.startswith("rank 1 goes on after 9")


def test_a_hang_ends_the_run_at_its_limit(ranks: Callable[..., Ranks]) -> None:
    two = ranks(5.0)
    two.beats[0].enter("all-reduce of gradients", "0,1/")
    first, last, *_ = two.told(6)
    assert not first.over and last.over and "Ended after 5 s without progress." in last.text


def test_a_program_without_our_verbs_is_told_soon_and_ended_when_nccl_would_end_it(
    ranks: Callable[..., Ranks],
) -> None:
    """Rank 0 may evaluate alone for minutes while the others wait."""
    two = ranks(60.0)
    for beat in two.beats:
        beat.phase("idle")
        beat.leave(beat.enter("all-reduce of gradients", "0,1/plain"))
    two.beats[0].enter("barrier", "0,1/plain")
    first, last, *_ = two.told(650)
    assert "rank 1 is in its phase idle" in first.text and "rank 0 waits for it in barrier" in first.text
    assert first.text.startswith("No progress for 30.") and not first.over
    assert last.over and "Ended after 600 s without progress." in last.text


def test_where_steps_are_few_a_rank_that_computes_is_not_silent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A check: as long as any load lets it take, and no longer than the limit where nobody does anything."""
    two = Ranks(tmp_path, monkeypatch, 60.0)
    two.watch = HangWatch(tmp_path, 60.0, idle=True)
    busy = True
    monkeypatch.setattr("meshwise.workers.stuck._seconds", lambda pid: 0.1 * two.now if busy else 0.0)
    monkeypatch.setattr("meshwise.workers.stuck.children_of", lambda pid: [])

    def told(seconds: float) -> list[hang.Hang]:
        found = []
        for _ in range(round(seconds / 0.25)):
            two.now += 0.25
            found.append(two.watch.look({0: 2**30, 1: 2**30 + 1}))
        return [each for each in found if each]

    two.beats[0].enter("all-reduce of gradients", "0,1/")
    assert told(600) == []
    busy = False
    first, last, *_ = told(75)
    assert not first.over and last.over and "rank 0 waits for it in all-reduce" in last.text
    assert "rank 1 does not report where" in last.text and "rank 0 does not report where" in last.text
    assert "Look for code that depends on the rank" in last.text and "--hang-limit" not in last.text


def test_where_steps_are_few_all_ranks_may_stand_in_what_nobody_knows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    two = Ranks(tmp_path, monkeypatch, 60.0)
    two.watch = HangWatch(tmp_path, 60.0, idle=True)
    over = next(each for each in two.told(70) if each.over)
    assert over.text.startswith("No progress for 60") and "rank 0 is in" in over.text and "rank 1 is in" in over.text


def test_a_launcher_that_was_stopped_itself_has_not_heard_a_silence(ranks: Callable[..., Ranks]) -> None:
    two = ranks()
    two.beats[0].enter("all-reduce of gradients", "0,1/")
    assert two.told(30, step=30) == []


def test_a_script_that_is_silent_on_all_ranks_is_left_alone(ranks: Callable[..., Ranks]) -> None:
    assert ranks(5.0).told(100) == []


def test_a_stopped_process_is_told_as_such(tmp_path: Path) -> None:
    with subprocess.Popen(["sleep", "60"]) as process:
        process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
        assert standing(process.pid, tmp_path / "stack").told == f"is stopped (kill -CONT {process.pid} lets it go on)"
        process.kill()


def test_a_stopped_process_has_no_patience_for_its_first_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(hang.time, "monotonic", lambda: now)
    beats, watch, found = [Heartbeat(beat_path(tmp_path, rank)) for rank in (0, 1)], HangWatch(tmp_path, 4.0), []
    for beat in beats:
        beat.step(1)
        beat.phase("forward")
    beats[0].enter("all-reduce of gradients", "0,1/")
    with subprocess.Popen(["sleep", "60"]) as process:
        process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
        for _ in range(24):
            now += 0.25
            found += [each for each in [watch.look({0: None, 1: process.pid})] if each]
        process.kill()
    assert found and found[-1].over and found[-1].rank == 1 and "kill -CONT" in found[-1].text


def test_a_process_that_does_not_handle_the_signal_is_not_sent_it(tmp_path: Path) -> None:
    with subprocess.Popen(["sleep", "60"]) as process:
        assert "does not report" in standing(process.pid, tmp_path / "stack").told
        assert process.poll() is None
        process.kill()


def test_where_python_stands_is_asked_of_a_process_and_of_what_it_started(tmp_path: Path) -> None:
    stack = tmp_path / "stack"
    reads, writes = os.pipe()
    if (pid := os.fork()) == 0:
        assert SIGNAL is not None
        faulthandler.register(SIGNAL, stack.open("ab"), all_threads=False)
        if os.fork() == 0:
            os.write(writes, b"!")
        while True:
            time.sleep(60)
    os.read(reads, 1)
    here = standing(pid, stack)
    child = stuck_child(pid, stack)
    for each in filter(None, (child, here)):
        os.kill(each.pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    assert here.users and "test_hang.py:" in here.told and "in test_where_python_stands" in here.told
    assert child is not None and child.pid != pid and "in test_where_python_stands" in child.told
