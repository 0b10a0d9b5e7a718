"""A script that knows nothing of us runs as one of several workers, on the devices that it was given."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from meshwise.training.jobs.script import run_script_file
from meshwise.workers.environment import DEVICE_KIND

BY_ACCELERATE = """
import torch
from accelerate import Accelerator
accelerator = Accelerator()
torch.manual_seed(0)
model, loader = torch.nn.Linear(4, 2), torch.utils.data.DataLoader(torch.randn(64, 4), batch_size=8)
model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader)
for x in loader:
    accelerator.backward(model(x).square().mean())
    optimizer.step()
print("ranks", accelerator.num_processes, "of", len(loader), "batches")
"""


@pytest.mark.parametrize(
    ("device", "line", "said"),
    [
        ("cpu", "", "true"),
        ("cuda", "", None),
        ("cpu", "\nimport meshwise", None),
        ("cpu", "\nimport meshwise  # and transformers.Trainer", "true"),
        ("cpu", "  # instead of import meshwise", "true"),
    ],
)
def test_on_cpu_workers_accelerate_and_trainer_are_told_of_the_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str, line: str, said: str | None
) -> None:
    """Else they look for GPUs alone, and each worker trains a model of its own, or transformers warns."""
    monkeypatch.setattr(os, "environ", {key: value for key, value in os.environ.items() if key != "ACCELERATE_USE_CPU"})
    monkeypatch.setitem(os.environ, DEVICE_KIND, device)
    monkeypatch.setattr(sys, "argv", [])
    monkeypatch.setattr(sys, "path", [*sys.path])
    script = tmp_path / "train.py"
    script.write_text(f"import os{line}\nfound = os.environ.get('ACCELERATE_USE_CPU')", encoding="utf-8")
    assert run_script_file(script, [])["found"] == said


@pytest.mark.slow
def test_workers_of_a_script_of_accelerate_train_together(processes: None, tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    (tmp_path / "train.py").write_text(BY_ACCELERATE, encoding="utf-8")
    command = [sys.executable, "-m", "meshwise", "run", "--devices", "2xcpu", "train.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert "ranks 2 of 4 batches" in done.stdout and "exchanged nothing" not in done.stdout + done.stderr, done
