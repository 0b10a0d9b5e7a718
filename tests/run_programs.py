"""Programs of the pages and of the examples, run in this process or in a worker of a pool."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

DOCS = Path(__file__).parents[1] / "docs"
Run = tuple[dict[str, Tensor], list[str]]


def run(program: str, folder: Path, dtype: torch.dtype = torch.float64) -> Run:
    """The weights that a program saves as model.pt, and the lines that it prints."""
    before, lines = Path.cwd(), list[str]()
    os.chdir(folder)
    torch.set_default_dtype(dtype)
    names: dict[str, Any] = {"__name__": "program", "print": lambda *words: lines.append(" ".join(map(str, words)))}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of other libraries
            exec(compile(re.sub(r"\b(accelerator|mw)\.print\(", "print(", program), "program.py", "exec"), names)
        return torch.load("model.pt", weights_only=True), lines
    finally:
        torch.set_default_dtype(torch.float32)
        os.chdir(before)


def numbers(lines: Sequence[str]) -> list[float]:
    return [float(n) for n in re.findall(r"\d+\.\d+", " ".join(lines))]


def assert_alike(found: Run, want: Run, within: float = 1e-9) -> None:
    """The same lines and weights, to a relative error."""
    assert want[1] and (found[1] == want[1] if within <= 1e-9 else len(found[1]) == len(want[1]))
    assert numbers(found[1]) == pytest.approx(numbers(want[1]), rel=within)
    torch.testing.assert_close(found[0], want[0], rtol=within, atol=within / 10)


def columns(page: str, heading: str) -> tuple[str, str, list[tuple[str, str]]]:
    """The two programs of a page that says line by line what changes, and the code in the rows of its table: "" where
    there is none."""
    text = (DOCS / page).read_text(encoding="utf-8")
    theirs, ours = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    table = text.partition(heading)[2].partition("\n\n")[0].splitlines()[2:]
    rows = [re.findall(r"`([^`]+)`|–", row.rsplit("|", 2)[0]) for row in table]
    return theirs, ours, [(left, right) for left, right in rows]


def quoted(rows: list[tuple[str, str]], theirs: str, ours: str) -> bool:
    """Whether each side of each row stands in its program."""
    return all(left in theirs and right in ours for left, right in rows)
