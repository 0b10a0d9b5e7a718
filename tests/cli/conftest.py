"""A command line typed in this process; one run of a built-in job, for all tests that only read what it left."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from meshwise import cli

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


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """`command("checkpoints", "RUN")`: its exit code, and what it prints on stdout and beside it."""

    def call(*words: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["meshwise", *map(str, words)])
        with pytest.raises(SystemExit) as end:
            cli.main()
        shown = capsys.readouterr()
        return int(end.value.code or 0), shown.out, shown.err

    return call
