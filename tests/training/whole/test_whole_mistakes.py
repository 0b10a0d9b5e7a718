"""Mistakes of newcomers come out right under the whole view, or are refused or said, and none stays silent."""

from __future__ import annotations

import re
import warnings
from typing import Any

import pytest

from meshwise.spec.errors import MeshwiseError
from meshwise.training.process import session
from tests.training.whole import mistakes_of_steps
from tests.training.whole.running import apart, run, whole

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:Converting a tensor with requires_grad"),  # LBFGS reads its loss so
]
BOUND, QUIET = 1e-9, re.compile(r"divided: |Sequential \(\S+\) runs operator by operator")


def outcome(name: str) -> tuple[str, Any, list[str]]:
    """What a mistake comes to on this rank: a verdict or an error's name, what it left or said, and the notices."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            left = whole(mistakes_of_steps.MADE[name][1])
            session.program_ends()
    except MeshwiseError as error:
        return "refused", str(error), []
    except Exception as error:
        return "alone", type(error).__name__, []
    return "right", left, [each for each in session.engines[-1].notes if not QUIET.match(each)]


def alone(name: str) -> str:
    """The error that a mistake raises without our line."""
    try:
        run(mistakes_of_steps.MADE[name][1])
    except Exception as error:
        return type(error).__name__
    return ""


@pytest.mark.parametrize("name", mistakes_of_steps.MADE)
def test_a_mistake_is_right_refused_or_said(name: str, pool: Any) -> None:
    expected = mistakes_of_steps.MADE[name][0]
    for verdict, left, notes in pool(2).run(outcome, name):
        if verdict == "right" and expected == "said":
            assert notes
            continue
        assert verdict == expected, (verdict, left)
        if verdict == "right":
            far, at = apart(left, run(mistakes_of_steps.MADE[name][1]))
            assert far <= BOUND, at
        elif verdict == "alone":
            assert alone(name) == left
        else:
            assert len(left.split()) > 8


def test_all_mistakes_of_the_table_are_made() -> None:
    assert len(mistakes_of_steps.MADE) >= 70
