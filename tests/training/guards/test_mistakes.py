"""Mistakes that people make in scripts are right, refused or named, and a right twin of each is told nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.training.guards.mistakes import SCRIPTS, of_mistake, of_twin, sides

MISTAKES = sorted(SCRIPTS.glob("*.py"))
BY_CHECK = (
    *("rate_times_ranks", "scheduler_times_ranks", "steps_divided", "sum_twice", "dice_metric"),
    *("local_count", "replay_class", "padded_by_rank", "val_loader_forgotten", "model_behind_loop"),
    *("break_on_local_loss", "rows_in_a_loop", "set_epoch_forgotten"),
    *("sum_forgotten", "joined_behind_another_loop", "local_means_averaged"),
)
"""What only `meshwise check` names."""


@pytest.mark.slow
@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize("script", MISTAKES, ids=lambda path: path.stem)
def test_a_mistake_is_never_silent(script: Path, tmp_path: Path) -> None:
    verdict, said = of_mistake(sides(script, tmp_path)[0])
    assert verdict in ("right", "refused", "said") or (verdict == "check" and script.stem in BY_CHECK), (verdict, said)


@pytest.mark.slow
@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize("script", MISTAKES, ids=lambda path: path.stem)
def test_a_right_twin_is_let_alone(script: Path, tmp_path: Path) -> None:
    assert of_twin(sides(script, tmp_path)[1]) == ("clean", "")


def test_every_script_has_a_twin_that_python_reads(tmp_path: Path) -> None:
    for script in MISTAKES:
        wrong, right = sides(script, tmp_path)
        assert compile(wrong.read_text(), script.name, "exec") and compile(right.read_text(), script.name, "exec")
        assert wrong.read_text() != right.read_text(), script.name
