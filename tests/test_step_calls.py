"""What a steady step calls is counted, and may only become less: bench/path.py says what is counted."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "bench"))

import path as step_path

pytestmark = pytest.mark.usefixtures("own_fork_server")

CEILING = {
    "job, two workers": (14, 52, 468, 66, 2),
    "script by rank, two workers": (17, 44, 507, 52, 1),
    "script, two workers": (39, 126, 945, 212, 19),
}
"""Files, functions, lines of these, calls of ours, calls of Python's library for ours (Python 3.11): only lowered.
Raised once, by 4 and 6 lines, when the end of a sum (19 lines) came from a thread, uncounted, to this one."""


@pytest.mark.parametrize("program", CEILING)
def test_a_steady_step_calls_no_more_than_before_and_the_docs_list_its_files(
    program: str, record_property: Callable[[str, object], None]
) -> None:
    step = step_path.steady_step(step_path.trace(step_path.PROGRAMS[program], whole=False))
    row = step_path.row(step)
    record_property("shown", f"{program}, a steady step: {row}")
    over = [name for name, most in zip(step_path.FIGURES, CEILING[program], strict=True) if step[name] > most]
    entered = "\n".join(f"{calls} x {file} {function}" for file, function, calls, _ in step["entered"])
    assert not over, f"{row}; allowed are {CEILING[program]}\n{entered}\n{step['library']}"
    page = step_path.PAGE.read_text()
    assert step_path.files_of(step) in page, "docs/architecture.md lists other files: run `python bench/path.py`"
