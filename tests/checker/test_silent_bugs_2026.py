"""Silent bugs of threads of 2025 and 2026 are found, and programs without them are equal."""

from __future__ import annotations

from typing import Any

import pytest

from tests.checker.script_sides import as_it_was  # noqa: F401
from tests.checker.silent_bugs_2026 import BUGS, JOBS, judged, played, threads, twins

QUICK = ("P05", "P36", "P56")
"""A mask of attention that is divided by hand, moments in bfloat16, and a validation that is averaged once more."""


@pytest.mark.parametrize(
    "thread", [pytest.param(t, id=t.row, marks=[pytest.mark.slow] * (t.row not in QUICK)) for t in threads()]
)
def test_a_silent_bug_is_found(thread: Any, pool: Any) -> None:
    found = judged(thread, pool)
    assert found["found"], found["said"]
    assert thread.row not in QUICK or found["cause right"], found["said"]


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name != "P03")) for name in twins()])
def test_the_same_program_without_it_is_equal(name: str, pool: Any) -> None:
    found = played(*twins()[name], pool)
    assert found.equal and not found.not_judged, (found.comparison.first, found.cause, found.not_judged)


def test_every_row_of_the_list_is_played_once() -> None:
    rows = [thread.row for thread in threads()]
    assert len(set(rows)) == len(rows) == len({thread.of for thread in threads()})
    assert {*rows} == {*BUGS, *JOBS} and not {*BUGS} & {*JOBS}
    assert all(bug.wrong() != bug.right() for bug in BUGS.values())
