"""Tests on a GPU that is not there: torch's CUDA wheel over the fake CUDA of this folder (README.md).

`make cuda` installs the wheel, builds the fake and runs them. Elsewhere, where torch is a CPU build, they are not
collected; MESHWISE_FAKE_CUDA says that they must be, so that a fake that does not load fails and is not skipped.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

FOLDER = os.environ.get("MESHWISE_FAKE_CUDA")
SOURCE = Path(__file__).parent.parent.parent / "src"

if FOLDER is None:
    collect_ignore_glob = ["test_*.py"]

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="session", autouse=True)
def the_fake_is_loaded(processes: None) -> None:
    """The tests run under the fake itself, so that a CPU build of torch or a missing library cannot pass as success."""
    import fake_cuda
    import torch

    assert Path(fake_cuda.__file__).parent.parent == Path(str(FOLDER)).resolve()
    assert torch.version.cuda is not None


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """`fake(devices=4, gpu="T4", memory=512, schedule="random", seed=3)`: what processes started from now on find."""

    def settings(**given: object) -> None:
        for name, value in given.items():
            monkeypatch.setenv(f"FAKE_CUDA_{name.upper()}", str(value))

    return settings


@pytest.fixture
def python(tmp_path: Path, processes: None) -> Run:
    """`python("-c", text)` or `python("-m", "meshwise", "run", …)` in the test's folder, with its output as text."""

    def run(*words: object, timeout: float = 240, check: bool = True) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, *map(str, words)]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=timeout, check=False)
        if check and done.returncode:
            shown = f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
            pytest.fail(f"{' '.join(map(str, words))[:200]}: exit code {done.returncode}\n{shown}")
        return done

    return run


@pytest.fixture
def meshwise(python: Run) -> Run:
    """`meshwise("run", "mnist-mlp", …)` in the test's folder."""
    return lambda *words, **how: python("-m", "meshwise", *words, **how)


def run_of(folder: Path) -> dict[str, object]:
    """The record of the newest run in FOLDER."""
    newest = max((folder / "runs").glob("*/run.json"), key=lambda path: path.stat().st_mtime)
    record: dict[str, object] = json.loads(newest.read_text())
    return record
