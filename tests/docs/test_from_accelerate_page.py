"""docs/from-accelerate.md: both programs run and end with the same weights, ours on two devices too; its table quotes
them."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from meshwise.process.session import end_sessions

PAGE = Path(__file__).parents[2] / "docs" / "from-accelerate.md"
THEIRS, OURS = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)


def run(program: str, folder: str) -> tuple[dict[str, Tensor], list[str]]:
    """The weights that a program saves, and what it prints, in float64."""
    before, lines = Path.cwd(), list[str]()
    os.chdir(folder)
    torch.set_default_dtype(torch.float64)
    names: dict[str, Any] = {"print": lambda *words: lines.append(" ".join(map(str, words)))}
    try:
        program = re.sub(r"\b(accelerator|mw)\.print\(", "print(", program)
        exec(compile(program, "page.py", "exec"), names)
        return torch.load("model.pt", weights_only=True), lines
    finally:
        torch.set_default_dtype(torch.float32)
        os.chdir(before)


def test_both_columns_train_the_same_model(pool: Any, tmp_path: Path) -> None:
    pytest.importorskip("accelerate", reason="accelerate is not installed: pip install accelerate")
    states = __import__("accelerate.state").state
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ACCELERATE_USE_CPU", "true")
        weights, lines = run(THEIRS, str(tmp_path))
    states.AcceleratorState._reset_state(reset_partial_state=True)
    end_sessions()
    for found, said in (run(OURS, str(tmp_path)), *pool(2).run(run, OURS, str(tmp_path))):
        assert said == lines and len(lines) == 2
        for name, value in weights.items():
            torch.testing.assert_close(found[name], value, rtol=1e-9, atol=1e-10)


def test_the_table_quotes_the_programs() -> None:
    table = (
        PAGE.read_text(encoding="utf-8").partition("| accelerate | meshwise | what changes |")[2].partition("\n\n")[0]
    )
    rows = [re.findall(r"`([^`]+)`|(–)", line.rsplit("|", 2)[0]) for line in table.splitlines()[2:]]
    assert len(rows) == 11
    for (theirs, _), (ours, nothing) in rows:
        assert theirs in THEIRS
        assert nothing or ours in OURS
