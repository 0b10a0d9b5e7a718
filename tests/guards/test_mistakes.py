"""Mistakes that people make in scripts are right, refused or named, and a right twin of each is told nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.guards.mistakes import SCRIPTS, of_mistake, of_twin

TWINS = sorted(SCRIPTS.glob("*_right.py"))
MISTAKES = [twin.with_name(f"{twin.stem.removesuffix('_right')}.py") for twin in TWINS]
BY_CHECK = ("rate_times_ranks", "scheduler_times_ranks", "steps_divided")
"""What only `meshwise check` names."""


@pytest.mark.slow
@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize("path", MISTAKES, ids=lambda path: path.stem)
def test_a_mistake_is_never_silent(path: Path) -> None:
    verdict, said = of_mistake(path)
    assert verdict in ("right", "refused", "said") or (verdict == "check" and path.stem in BY_CHECK), (verdict, said)


@pytest.mark.slow
@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize("path", TWINS, ids=lambda path: path.stem)
def test_a_right_twin_is_let_alone(path: Path) -> None:
    assert of_twin(path) == ("clean", "")


def test_every_script_is_one_of_a_pair() -> None:
    assert {*MISTAKES, *TWINS} == {*SCRIPTS.glob("*.py")}
