"""docs/arrays.md: its blocks run as they stand, one after another, with small arrays."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "arrays.md"


def test_the_blocks_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    for block in blocks:
        exec(block.replace("10_000_000", "1_000"), names)
    shown = capsys.readouterr().out
    assert shown.splitlines()[1] == "(900, 100) (750, 250)"
    assert abs(float(shown.splitlines()[0])) < 1e-9
    assert "0 B with x dim " in shown
