"""The state is saved after so many steps, so much time, or as often as costs little. The ranks seldom ask."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from meshwise.spec.saves import Saves
from meshwise.spec.world import World
from meshwise.training.recovery import clock as clocks
from meshwise.training.recovery.clock import SaveClock
from meshwise.training.recovery.saving import Saver
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
    clock, due = SaveClock(Saves(seconds=60), clock=lambda: now[0]), []
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
    clock = SaveClock(Saves(seconds=60), clock=lambda: now[0])
    for step in range(1, 1000):
        now[0] += 0.1 if step < 100 else 1.0
        if clock.is_due(step):
            break
    assert 60 <= now[0] < 400


def state() -> dict[str, Any]:
    return {"w": torch.zeros(1 << 20)}


@pytest.mark.parametrize(("stall", "writing", "every"), [(0.0, 0.0, 60), (0.5, 6.5, 65), (1.5, 6.5, 150)])
def test_by_default_a_state_is_due_as_often_as_costs_little(
    stall: float, writing: float, every: int, tmp_path: Path
) -> None:
    now, said = [0.0], list[str]()
    saver = Saver(tmp_path, World(), said.append)
    clock, due = SaveClock(Saves(), saver, state, clock=lambda: now[0]), []
    for step in range(1, 400):
        now[0] += 1.0
        if clock.is_due(step):
            due.append(step)
            saver.stall_seconds, saver.write_seconds = stall, writing
    assert due == [61, *range(61 + every, 400, every)]
    assert said[0] == (
        "the state (4.0 MiB) is saved in the background every 1 min 00 s, so a fault costs at most the work since "
        "then. --save-every sets how often."
    )
    late = ["the state is saved every 2 min 30 s from now on, as saving takes that long."]
    assert said[1:] == (late if every == 150 else [])


@pytest.mark.parametrize(
    ("disk", "memory", "says"),
    [
        (100, 100, "3 states of 4.0 MiB take more than a tenth of the 100.0 MiB that are free on the disk"),
        (200, 10, "a copy of 4.0 MiB takes more than a quarter of the 10.0 MiB of free memory"),
    ],
)
def test_where_space_is_short_no_state_is_saved_in_the_background(
    disk: int, memory: int, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, said = [0.0], list[str]()
    monkeypatch.setattr(clocks.shutil, "disk_usage", lambda folder: SimpleNamespace(free=disk << 20))
    monkeypatch.setattr(clocks, "free_bytes", lambda device: memory << 20)
    clock = SaveClock(Saves(), Saver(tmp_path, World(), said.append), state, clock=lambda: now[0])
    for step in range(1, 400):
        now[0] += 1.0
        assert not clock.is_due(step)
    assert clock.look == math.inf
    assert said == [f"no state is saved in the background: {says}. Set --save-every to save it all the same."]
