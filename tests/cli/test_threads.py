"""A plain script under `meshwise run` on one device computes what `python` computes, bit for bit, with any threads."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import torch
from torch import nn

torch.manual_seed(0)
x, y = torch.randn(64, 3, 24, 24), torch.randint(0, 10, (64,))
model = nn.Sequential(nn.Conv2d(3, 32, 3), nn.BatchNorm2d(32), nn.ReLU(), nn.Flatten(), nn.Linear(32 * 22 * 22, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
print("threads", torch.get_num_threads())
for _ in range(4):
    loss = nn.functional.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    print("loss", loss.item().hex())
"""


@pytest.mark.parametrize(
    "threads", ["1", pytest.param("2", marks=pytest.mark.slow), pytest.param("", marks=pytest.mark.slow)]
)
def test_a_plain_script_has_the_losses_of_python(threads: str, tmp_path: Path, own_fork_server: None) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    variables = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    variables |= {"OMP_NUM_THREADS": threads} if threads else {}

    def printed(*words: str) -> list[str]:
        command = [sys.executable, *words, "train.py"]
        done = subprocess.run(command, cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stdout + done.stderr
        return [line for line in done.stdout.splitlines() if line.startswith(("threads ", "loss "))]

    alone = printed()
    assert threads in ("", alone[0].removeprefix("threads "))
    assert printed("-m", "meshwise", "run", "--devices", "1xcpu") == alone
