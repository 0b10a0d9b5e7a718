"""Silent bugs that other frameworks had are found, with module and cause."""

from __future__ import annotations

from typing import Any

import pytest

from tests.checker.silent_bugs import NOT_PLAYED, SILENT, Silent, judged

QUICK = ("SB032", "SB034", "SB044", "SB087")
"""Of tensor parallel, of a pipeline, and of a run that is resumed."""
OTHER_CAUSE = {
    "SB004": "missing reduction: a sum over a wrong group looks the same, whichever run of a block it is in",
}
"""Rows whose cause check does not name as the list does, and what it says."""


def cases() -> list[Any]:
    return [pytest.param(bug, id=bug.row, marks=[pytest.mark.slow] * (bug.row not in QUICK)) for bug in SILENT]


@pytest.mark.parametrize("bug", cases())
def test_a_silent_bug_is_found_and_said_as_a_person_would(bug: Silent, pool: Any) -> None:
    found = judged(bug, pool)
    assert found["found"] and found["kind right"] and found["module right"], found["said"]
    assert found["cause right"] == (bug.row not in OTHER_CAUSE), found["said"]


def test_every_row_of_the_list_is_played_or_says_why_not() -> None:
    played = [bug.row for bug in SILENT if bug.row.startswith("SB")]
    assert len(played) == len(set(played)) and not set(played) & NOT_PLAYED.keys()
    assert len(played) + len(NOT_PLAYED) == 80
