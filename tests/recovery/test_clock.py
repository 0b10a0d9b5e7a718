"""The state is saved after so many steps or so much time, and the ranks seldom ask how late it is."""

from __future__ import annotations

import pytest

from meshwise.recovery.clock import SaveClock
from meshwise.spec.saves import Saves
from meshwise.transfer import collectives


@pytest.mark.parametrize(("saves", "due"), [(Saves(), []), (Saves(steps=4), [4, 8, 12])])
def test_steps_are_counted(saves: Saves, due: list[int]) -> None:
    clock = SaveClock(saves)
    assert [step for step in range(1, 14) if clock.is_due(step)] == due


@pytest.mark.parametrize("pace", [0.01, 1.0, 200.0])
def test_time_is_rank_0s_and_looked_at_a_few_times(pace: float, monkeypatch: pytest.MonkeyPatch) -> None:
    now, looks, real = [0.0], [0], collectives.broadcast_object

    def asked(*given: object) -> object:
        looks[0] += 1
        return real(*given)  # type: ignore[arg-type]

    monkeypatch.setattr(collectives, "broadcast_object", asked)
    clock, due = SaveClock(Saves(seconds=60), lambda: now[0]), []
    for step in range(1, 20_001):
        now[0] += pace
        if clock.is_due(step):
            due.append(now[0])
    gaps = [after - before for before, after in zip([pace, *due], due, strict=False)]
    assert all(60 <= gap <= 60 + 2 * pace for gap in gaps[:-1]) or pace > 60
    assert len(due) == (19_999 if pace > 60 else int(20_000 * pace / 60.02))
    assert looks[0] <= (len(due) + 1) * 14


def test_a_run_that_slows_down_is_not_late_by_more_than_it_slowed(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    clock = SaveClock(Saves(seconds=60), lambda: now[0])
    for step in range(1, 1000):
        now[0] += 0.1 if step < 100 else 1.0
        if clock.is_due(step):
            break
    assert 60 <= now[0] < 400
