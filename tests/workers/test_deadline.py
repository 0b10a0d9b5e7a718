"""The stop before the time is over. With real runs: test_slurm.py and tests/faults/test_signals.py."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from datetime import datetime
from threading import Event, Thread
from typing import Any

import pytest

from meshwise.workers import gate as gates
from meshwise.workers.gate import WARM, StepGate

JOB = {"SLURM_JOB_ID": "7"}
LONG = 30.0  # seconds in which a stop that is due is asked for on any machine


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gates, "LOOK", 0.01)


def gate_of(*, step: float = 0.0, save: float = 0.0, saves: bool = True) -> StepGate:
    gate = StepGate()
    gate.saves, gate.longest_step, gate.longest_save = saves, step, save
    return gate


def stops_within(
    seconds: float,
    gate: StepGate,
    environment: dict[str, str],
    left_of: Callable[[str], float | None] = lambda job: None,
) -> float | None:
    """After how many seconds a stop is asked for; None where it is not within these. left_of: the seconds left of a
    job, as squeue says."""

    def end_of(job: str) -> float | None:
        left = left_of(job)
        return None if left is None else time.time() + left

    over, asked, began = Event(), list[float](), time.time()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gates, "end_by_squeue", end_of)
        for name in (*JOB, "SLURM_JOB_END_TIME", gates.LIMIT):
            patch.delenv(name, raising=False)
        for name, value in environment.items():
            patch.setenv(name, value)
        watching = Thread(target=gates.watch_time, args=(gate, lambda: asked.append(time.time() - began), over))
        watching.start()
        watching.join(seconds)
        over.set()
        watching.join()
    return asked[0] if asked else None


def ends_in(seconds: float) -> str:
    return str(int(time.time() + seconds))


@pytest.mark.parametrize(
    ("step", "save", "left", "stops"),
    [(0.1, 0.2, 20, False), (0.1, 0.2, 0, True), (30.0, 0.2, 20, True), (0.1, 8.0, 20, True), (0.1, 4.0, 20, False)],
)
def test_it_stops_when_less_is_left_than_a_step_and_three_saves(
    step: float, save: float, left: float, stops: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    environment = JOB | {"SLURM_JOB_END_TIME": ends_in(left)}
    assert (stops_within(LONG if stops else 0.2, gate_of(step=step, save=save), environment) is not None) == stops
    assert ("left of job 7, a step (" in capsys.readouterr().err) == stops


def test_a_run_that_saves_nothing_is_left_its_last_second() -> None:
    soon = JOB | {"SLURM_JOB_END_TIME": ends_in(0)}
    assert stops_within(0.2, gate_of(save=3.0, saves=False), soon) is None
    assert stops_within(LONG, gate_of(save=3.0), soon) is not None


@pytest.mark.parametrize(("left", "stops"), [(10_000, False), (50, False), (5, False)])
def test_a_save_that_was_never_measured_takes_a_share_of_the_time_at_most(left: float, stops: bool) -> None:
    environment = JOB | {"SLURM_JOB_END_TIME": ends_in(left)}
    assert (stops_within(0.2, gate_of(), environment) is not None) == stops


def test_what_was_never_measured_counts_and_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    left = iter([3600.0, 50.0])
    found = stops_within(0.5, gate_of(), JOB, left_of=lambda job: next(left, None))
    assert found is None  # squeue is asked once a minute
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gates, "ASK", 0.05)
        left = iter([3600.0, 50.0])
        assert stops_within(LONG, gate_of(), JOB, left_of=lambda job: next(left, None)) is not None
    assert "3 saves (1 min 00 s) to come: stopping" in capsys.readouterr().err


def test_a_limit_that_is_changed_is_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gates, "ASK", 0.05)
    soon = JOB | {"SLURM_JOB_END_TIME": ends_in(3)}
    assert stops_within(4.0, gate_of(save=0.001), soon, left_of=lambda job: 3600.0) is None  # made longer
    far = JOB | {"SLURM_JOB_END_TIME": ends_in(3600)}
    assert stops_within(LONG, gate_of(save=0.001), far, left_of=lambda job: 0.0) is not None  # made shorter
    assert stops_within(0.3, gate_of(save=0.001), far, left_of=lambda job: math.inf) is None


def test_the_time_limit_of_the_run_is_one(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    environment = {gates.LIMIT: repr(time.time() + 10)}
    assert stops_within(0.2, gate_of(step=0.1, save=1.0), environment) is None
    assert stops_within(0.2, gate_of(), environment) is None  # a save that is not known is not guessed: nobody kills
    assert stops_within(LONG, gate_of(save=4.0), environment) is not None
    assert stops_within(LONG, gate_of(step=12.0, saves=False), environment) is not None
    assert "left of the time limit, a step (12.0 s) to come: stopping" in capsys.readouterr().err


def test_the_time_limit_is_known_to_what_is_started_inside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(gates.LIMIT, raising=False)
    with gates.Halt().after(90.0):
        assert float(gates.os.environ[gates.LIMIT]) == pytest.approx(time.time() + 90, abs=5)
    with gates.Halt().after(None):
        assert gates.LIMIT not in gates.os.environ


def test_the_longest_step_is_measured_without_the_first_ones() -> None:
    gate = StepGate()
    for _ in range(WARM):
        gate.begin()
        time.sleep(0.02)
    assert gate.longest_step == 0.0
    gate.begin()
    assert gate.longest_step >= 0.02
    before = gate.longest_step
    gate.begin()
    assert gate.longest_step == before


def test_squeue_is_asked_when_a_job_ends(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert gates.end_by_squeue("7") is None  # there is none
    (tmp_path / "squeue").write_text("#!/bin/sh\nexit 1\n")
    (tmp_path / "squeue").chmod(0o755)
    assert gates.end_by_squeue("7") is None
    for text in ("N/A", "NONE", ""):  # of a job without a limit, or that is over
        (tmp_path / "squeue").write_text(f"#!/bin/sh\necho '{text}'\n")
        assert gates.end_by_squeue("7") is None
    (tmp_path / "squeue").write_text("#!/bin/sh\ntest $SLURM_TIME_FORMAT = standard && echo 2026-12-01T10:00:05\n")
    assert gates.end_by_squeue("7") == datetime(2026, 12, 1, 10, 0, 5).timestamp()
