"""What a race is told like: both lines, the streams by name, what to write. Of checker/races/finding.py too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from meshwise.checker.races.checker import Checker, Race, Touch
from meshwise.checker.races.finding import Finding, LaneNames, Line, Stack, find, stack
from meshwise.checker.races.memory import region_of
from meshwise.spec.user_code import OURS
from meshwise.torch_compat.gpu_trace import HOST, Lane

DEFAULT, SIDE = (1, 0), (1, 70)
TRAIN, EVAL, EARLY = (Stack((Line(str(Path.cwd() / "train.py"), line, "main"),)) for line in (88, 90, 3))
COPIES = Stack((Line(f"{OURS}transfer/path.py", 50, "staged"), *EVAL.lines))


def told(*program: Any) -> Finding:
    races: list[Race] = []
    checker = Checker(races.append)
    for step in program:
        step(checker)
    (race,) = races
    return find(race, LaneNames())


def on(lane: Lane, where: Stack, writes: bool) -> Any:
    region = region_of(64, 4, (4, 4), (4, 1))
    assert region is not None
    what = f"float32 [4, 4], by {'copy_' if writes else 'add'}"
    return lambda checker: checker.touch(lane, [Touch(64, 64, region, writes, what)], where)


def test_a_missing_wait_is_told_with_both_lines() -> None:
    finding = told(on(DEFAULT, TRAIN, True), on(SIDE, COPIES, False))
    assert finding.text.splitlines() == [
        "meshwise/transfer/path.py:50: stream 1 of cuda:1 reads what the default stream wrote at train.py:88, "
        "without waiting for it.",
        "    Call stream.wait_stream(other) before it, where stream is stream 1 of cuda:1 and other is the default "
        "stream.",
        "    reads at meshwise/transfer/path.py:50 staged < train.py:90 main (float32 [4, 4], by add)",
        "    wrote at train.py:88 main (float32 [4, 4], by copy_)",
    ]


def test_an_event_that_came_too_early_is_named() -> None:
    finding = told(
        lambda checker: checker.order.record(1, DEFAULT, EARLY),
        on(DEFAULT, TRAIN, True),
        lambda checker: checker.order.wait(1, SIDE),
        on(SIDE, EVAL, False),
    )
    assert "was recorded too early, at train.py:3. Record an event after train.py:88" in finding.advice


def test_the_host_is_told_to_wait() -> None:
    finding = told(on(SIDE, TRAIN, True), on(HOST, EVAL, False))
    assert finding.sentence.startswith("train.py:90: the host reads what stream 1 of cuda:1 wrote at train.py:88")
    assert "event.synchronize()" in finding.advice


def test_memory_that_was_freed_too_early_is_told_with_the_line_that_let_it_go() -> None:
    finding = told(
        lambda checker: checker.allocate(64, DEFAULT),
        on(SIDE, TRAIN, False),
        lambda checker: checker.free(64, EARLY),
        lambda checker: checker.allocate(64, DEFAULT),
        on(DEFAULT, EVAL, True),
    )
    assert "memory freed at train.py:3, which stream 1 reads at train.py:88" in finding.sentence
    assert "record_stream" in finding.advice


def test_a_stream_of_nccl_is_named_so() -> None:
    names = LaneNames()
    names.is_nccls(SIDE)
    assert names.name(SIDE) == "NCCL's stream of cuda:1" and names.name(SIDE, DEFAULT) == "NCCL's stream"
    assert names.name((1, 9)) == "stream 1 of cuda:1"


def test_a_stack_has_the_lines_of_the_user_and_none_of_python() -> None:
    here = stack()
    assert here.place.startswith("tests/checker/races/test_finding.py:")
    assert not any("/lib/python" in line.file and "site-packages" not in line.file for line in here.lines)
