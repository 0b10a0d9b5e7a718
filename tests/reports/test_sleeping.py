"""Real workers that sleep for known times: what is reported is what they slept, and who was late is named."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from meshwise.reports.spans import KIND
from meshwise.reports.step_table import decisive, step_table_of
from tests.pool import Pool
from tests.reports.sleeping import EVEN, measured


@pytest.mark.slow  # a bound on milliseconds
def test_reported_times_are_what_was_slept(pool: Callable[[int], Pool], tmp_path: Path) -> None:
    timeline, report, slept = measured(pool(3).run, tmp_path, 30, {2: {"forward": 15.0}}, ranks=3)
    table = step_table_of(timeline)
    assert timeline.missing == () and report.steps == 30
    for rank in range(3):
        for phase, seconds in slept[rank].items():
            reported = table.seconds[table.trained, rank, KIND[phase]]
            off = np.median(np.abs(reported - np.array(seconds)))
            assert off <= max(0.002, 0.02 * np.median(seconds)), (rank, phase, off)
    waited = [table.seconds[table.trained, rank, KIND["waiting"]] for rank in range(3)]
    assert np.median(waited[0]) == pytest.approx(0.015, abs=0.002)
    assert np.median(waited[2]) < 0.002
    parts = sum(part.seconds for part in report.goodput)
    assert parts == pytest.approx(report.wall_seconds, rel=1e-6)
    assert sum(part.share for part in report.goodput) == pytest.approx(1.0, rel=1e-6)


@pytest.mark.parametrize("phase", EVEN)
def test_who_is_late_is_named_with_the_phase(pool: Callable[[int], Pool], tmp_path: Path, phase: str) -> None:
    """By far more than what a loaded machine holds a rank back for."""
    _, report, _ = measured(pool(3).run, tmp_path, 12, {1: {phase: 200.0}}, ranks=3)
    (late,) = [finding for finding in report.findings if finding.kind == "straggler"]
    assert (late.rank, late.phase) == (1, phase)


@pytest.mark.slow  # a bound on milliseconds
@pytest.mark.parametrize("phase", EVEN)
def test_twenty_milliseconds_more_are_named(pool: Callable[[int], Pool], tmp_path: Path, phase: str) -> None:
    """In 95 % of the steps; a shared machine may hold any rank back for a moment, so the best of three runs counts."""
    named = 0.0
    for attempt in range(3):
        timeline, report, _ = measured(pool(3).run, tmp_path / str(attempt), 40, {1: {phase: 20.0}}, ranks=3)
        met = step_table_of(timeline).sync_points
        # What one rank does after its last meeting is late for the next: 39 of 40 steps can show a late optimizer.
        at = decisive(met)
        steps = at[met.step[at] > (1 if phase == "optimizer" else 0)]
        named = max(named, float(((met.rank == 1) & (met.phase == KIND[phase]))[steps].mean()))
        (late,) = [finding for finding in report.findings if finding.kind == "straggler"]
        assert (late.rank, late.phase) == (1, phase)
        if named >= 0.95 and late.seconds == pytest.approx(0.020, rel=0.2):
            return
    pytest.fail(f"rank 1 was named with {phase} in {named:.0%} of the steps, at a cost of {late.seconds:.4f} s")


@pytest.mark.slow
def test_no_rank_is_named_in_a_hundred_clean_runs(pool: Callable[[int], Pool], tmp_path: Path) -> None:
    named = []
    for number in range(100):
        _, report, _ = measured(pool(3).run, tmp_path / str(number), 20, {}, ranks=3)
        named += [finding.sentence for finding in report.findings if finding.kind == "straggler"]
    assert named == []
