"""One run of a built-in job, for all tests that only read what it left."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

WORDS = ["run", "mnist-mlp", "--epochs", "1", "--batch-size", "1000", "--log-every", "20"]


@pytest.fixture(scope="session")
def mnist_run(tmp_path_factory: pytest.TempPathFactory, processes: None) -> tuple[Path, str, str]:
    """60 steps, with blocks recorded: its folder, and what it showed on stdout and beside it."""
    out = tmp_path_factory.mktemp("runs")
    command = [sys.executable, "-m", "meshwise", *WORDS, "--json", "--devices", "2xcpu", "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    (folder,) = out.iterdir()
    return folder, done.stdout, done.stderr
