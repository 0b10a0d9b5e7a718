"""Tests on a GPU that is not there: torch's CUDA wheel over the fake CUDA of this folder (README.md).

`make cuda` installs the wheel, builds the fake and runs them. Elsewhere, where torch is a CPU build, they are not
collected; MESHWISE_FAKE_CUDA says that they must be, so that a fake that does not load fails and is not skipped.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.cuda.evidence import pytest_runtest_logreport, pytest_runtest_setup, pytest_sessionfinish  # noqa: F401
from tests.pool import Pool

FOLDER = os.environ.get("MESHWISE_FAKE_CUDA")
SOURCE = Path(__file__).parent.parent.parent / "src"

if FOLDER is None:
    collect_ignore_glob = ["test_*.py"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of this folder alone: pytest calls every conftest with all items."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.cuda)


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


@pytest.fixture(scope="session")
def forks(processes: None) -> Iterator[subprocess.Popen[str]]:
    """The process whose children run the programs of `program`."""
    command = [sys.executable, str(Path(__file__).with_name("forks.py"))]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        yield server
        server.stdin.close()


@pytest.fixture
def program(forks: subprocess.Popen[str], tmp_path: Path) -> Callable[..., str]:
    """`program(text, schedule="random", seed=3)`: what a Python program prints; it must end well."""

    def run(text: str, fails: bool = False, **settings: object) -> str:
        output = tmp_path / f"output-{len(list(tmp_path.iterdir()))}"
        variables = {f"FAKE_CUDA_{name.upper()}": str(value) for name, value in settings.items()}
        request = {"text": text, "folder": str(tmp_path), "variables": variables, "output": str(output)}
        print(json.dumps(request), file=forks.stdin, flush=True)
        code = json.loads(forks.stdout.readline())
        shown = output.read_text() if output.exists() else ""
        if (code != 0) is not fails:
            pytest.fail(f"exit code {code}: {text[:300]}\n{shown[-4000:]}")
        return shown

    return run


@pytest.fixture
def python(tmp_path: Path, processes: None) -> Run:
    """`python("-m", "meshwise", "run", …)` in the test's folder, with its output as text."""

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


@pytest.fixture(scope="session")
def gpus(processes: None) -> Iterator[Callable[..., Pool]]:
    """`gpus(2)`: two workers on fake GPUs in one process group, kept for all tests. Another schedule has other workers,
    kept until the next is asked for."""
    pools: dict[tuple[int, str], Pool] = {}

    def of(size: int, schedule: str = "immediate", seed: int = 0) -> Pool:
        if (key := (size, f"{schedule} {seed}")) not in pools:
            for other in [each for each in pools if each[1] != "immediate 0"]:
                pools.pop(other).close()
            pools[key] = Pool(
                size, "cuda", FAKE_CUDA_DEVICES="4", FAKE_CUDA_SCHEDULE=schedule, FAKE_CUDA_SEED=str(seed)
            )
        return pools[key]

    yield of
    for made in pools.values():
        made.close()


def run_of(folder: Path) -> dict[str, object]:
    """The record of the newest run in FOLDER."""
    newest = max((folder / "runs").glob("*/run.json"), key=lambda path: path.stat().st_mtime)
    record: dict[str, object] = json.loads(newest.read_text())
    return record
