"""What is said of a loop that goes on inside an epoch, and that a source which cannot be read has no slips."""

from __future__ import annotations

import linecache
import textwrap
from typing import Any

import pytest

from meshwise.training.slips import user_source
from meshwise.training.slips.in_a_run import says_resumed

LIBRARY = """
class Loader:
    start = 4

    def __iter__(self):
        self.said = says_resumed(self.start)
        yield 1

def bar(loader, **_):
    yield from loader
"""


def said_of(source: str) -> str:
    """What is said where this program runs."""
    name = f"<ipython-{abs(hash(source))}>"
    source = textwrap.dedent(source)
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    known: dict[str, Any] = {"says_resumed": says_resumed}
    exec(compile(LIBRARY, "<library>", "exec"), known)  # not the user's, by its name
    known["loader"] = known["Loader"]()
    exec(compile(source, name, "exec"), known)
    return str(known["loader"].said)


@pytest.mark.parametrize("line", ["for x in loader:", "for i, x in enumerate(bar(loader, desc='epoch')):"])
def test_a_loop_that_counts_from_0_is_told(line: str) -> None:
    said = said_of(f"{line}\n    pass\n")
    assert "resumes with batch 5 of its epoch" in said and "enumerate(loader, loader.start)" in said


@pytest.mark.parametrize(
    "line", ["for i, x in enumerate(loader, loader.start):", "for i, x in enumerate(bar(loader), start=loader.start):"]
)
def test_a_loop_with_a_start_is_told_nothing(line: str) -> None:
    assert said_of(f"{line}\n    pass\n") == ""


def test_a_source_that_cannot_be_read_has_no_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(user_source.linecache, "getlines", lambda *_: ["%matplotlib inline\n", "for x in loader:\n"])
    assert [*user_source.sources_in("cell")[0].calls()] == []
