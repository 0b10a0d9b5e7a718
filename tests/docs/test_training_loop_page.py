"""docs/training-loop.md: its program runs as it stands, with a small model and data."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from meshwise.training.process.session import end_sessions

PAGE = Path(__file__).parents[2] / "docs" / "training-loop.md"
BEFORE = """
import torch
from torch import nn
from torch.utils.data import TensorDataset

def make_data():
    x = torch.randn(30, 4)
    return TensorDataset(x[:20], x[:20].argmax(1)), TensorDataset(x[20:], x[20:].argmax(1))
def Net():
    return nn.Linear(4, 4)
"""


def test_the_program_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    program, *_ = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    made = "model = Net()\noptimizer = torch.optim.SGD(model.parameters(), 0.1)"
    assert program.count("model, optimizer = Net(), ...") == 1
    monkeypatch.chdir(tmp_path)
    end_sessions()
    names: dict[str, object] = {}
    exec(BEFORE + program.replace("model, optimizer = Net(), ...", made), names)
    end_sessions()
    predictions = names["predictions"]
    assert isinstance(predictions, list) and (tmp_path / "best.pt").exists()
    assert sum(map(len, predictions)) == 10
    assert capsys.readouterr().out.count("epoch ") == 10
