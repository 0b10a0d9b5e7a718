"""What is said of a loop that goes on inside an epoch, from its source."""

from __future__ import annotations

import linecache
import textwrap
from typing import Any

import pytest

from meshwise.training.slips import user_source
from meshwise.training.slips.in_a_run import says_counted

LIBRARY = """
class Loader:
    start = 4

    def __init__(self):
        self.said = []

    def __iter__(self):
        self.said += says_counted(self.start, [kept, kept['losses']])
        yield 1

def bar(loader, **_):
    yield from loader
"""


def said_of(source: str) -> list[str]:
    """What is said where this program runs."""
    name = f"<ipython-{abs(hash(source))}>"
    source = textwrap.dedent(source)
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    known: dict[str, Any] = {"says_counted": says_counted, "kept": {"total": 0, "losses": []}}
    exec(compile(LIBRARY, "<library>", "exec"), known)  # not the user's, by its name
    known["loader"] = known["Loader"]()
    exec(compile(source, name, "exec"), known)
    return list(known["loader"].said)


@pytest.mark.parametrize(
    "line, written",
    [
        ("for i, x in enumerate(loader):", "enumerate(loader, loader.start)"),
        ("for i, x in enumerate(bar(loader, desc='epoch')):", "enumerate(bar(loader, desc='epoch'), loader.start)"),
        ("for i, x in enumerate(bar(enumerate(loader))):", "enumerate(bar(enumerate(loader)), loader.start)"),
    ],
)
def test_enumerate_without_a_start_is_said(line: str, written: str) -> None:
    said = said_of(f"{line}\n    pass\n")
    assert "resumes with batch 5 of its epoch" in said[0] and f"write {written}." in said[0]


@pytest.mark.parametrize(
    "line",
    [
        "for i, x in enumerate(loader, loader.start):",
        "for i, x in enumerate(bar(loader), start=loader.start):",
        "for x in loader:  # enumerate(loader)",
    ],
)
def test_a_loop_with_a_start_or_without_numbers_is_told_nothing(line: str) -> None:
    assert said_of(f"{line}\n    pass\n") == []


@pytest.mark.parametrize(
    "before, body, names",
    [
        ("total = 0.0", "total += x", "total begins"),
        ("total, seen = 0, 0", "total += x; seen += 1", "total, seen begin"),
        ("total = seen = 0", "seen += 1", "seen begins"),
        ("total = 0.0", "total = total + x", "total begins"),
        ("mean = 0.0", "mean = 0.9 * mean + 0.1 * x", "mean begins"),
        ("best = float('inf')", "best = min(best, x)", "best begins"),
        ("hidden = None", "hidden = x if hidden is None else hidden + x", "hidden begins"),
        ("import torch\n    total = torch.zeros(2)", "total += x", "total begins"),
        ("losses = []", "losses.append(x)", "losses begins"),
        ("sums = {'loss': 0}", "sums['loss'] += x", "sums begins"),
        ("meter = type('Meter', (), {'update': lambda self, x: None})()", "meter.update(x)", "meter begins"),
        ("total: float = 0.0", "total += x\n        if x > 3: total = 0.0", "total begins"),
    ],
)
def test_sums_of_an_epoch_are_said(before: str, body: str, names: str) -> None:
    (said,) = said_of(f"def train():\n    {before}\n    for x in loader:\n        {body}\ntrain()\n")
    assert f"of its epoch, and {names} anew" in said and "extra=state" in said


def test_a_loop_in_one_line_is_read_too() -> None:
    (said,) = said_of("total = 0\nfor x in loader: total += x\ntotal = None\n")
    assert "total begins anew" in said


@pytest.mark.parametrize(
    "before, body",
    [
        ("step = 0\nstep = loader.start", "step += 1"),
        ("bar_ = type('tqdm', (), {'update': lambda self, x: None})()", "bar_.update(1)"),
        ("", "x = x + 1"),
        ("state = kept", "state['total'] += x"),
        ("losses = kept['losses']", "losses.append(x)"),
        ("", "found = []\n    found.append(x)"),
        ("scaler = type('Scaler', (), {'update': lambda self: None})()", "scaler.update()"),
        ("", "n = 0\n    n += 1"),
        ("total = 0", "last = total"),
    ],
)
def test_what_goes_on_or_belongs_to_a_batch_is_not_said(before: str, body: str) -> None:
    assert said_of(f"{before}\nfor x in loader:\n    {body}\n") == []


def test_a_source_that_cannot_be_read_is_told_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(user_source.linecache, "getlines", lambda *_: ["%matplotlib inline\n", "for x in loader:\n"])
    assert said_of("for x in loader:\n    pass\n") == []
