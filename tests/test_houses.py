"""Delete houses, and parts of houses, that the core does not need: each one, and all, in a copy of the package.

    python -m pytest -m slow tests/test_houses.py

The quick tests of the core pass without them, except the files in USE_A_HOUSE, which need one for what they compare.
"""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

SOURCES = Path(__file__).parents[1] / "src" / "meshwise"
HOUSES = {
    "checker": ("checker/",),
    "planner": ("planner/", "launcher/auto.py"),
    "arrays": ("arrays/",),
    "integrations": ("integrations/",),
    "bench": ("hardware/measure/", "hardware/views/bench.py", "hardware/bench.py", "hardware/commands/bench.py"),
    "submit": (
        *("launcher/engines/batch_script.py", "launcher/engines/site.py"),
        *("launcher/engines/kubernetes.py", "launcher/engines/manifest.py", "launcher/engines/ray.py"),
        *("launcher/submit.py", "launcher/pods.py", "launcher/commands/submit.py"),
    ),
}
MAY_IMPORT = {"planner": {"bench"}, "submit": {"planner"}}
"""A measured price needs the bench; a job is planned before it is submitted."""
OF_HOUSES = (
    *("arrays", "cli", "cuda", "docs", "checker", "examples", "hardware", "planner", "launcher/engines"),
    *("test_cli.py", "test_exports.py", "test_floors.py", "test_houses.py", "test_imports.py"),
)
"""Tests of a house, of all commands, of all files."""
USE_A_HOUSE = (
    *(
        "workers/test_scratch_files.py",
        "training/engine/test_held_bytes.py",
        "old/test_old.py",
        "parallel/splits/test_split_levels.py",
    ),
    *("training/script/test_lightning.py", "training/script/test_trainer.py", "training/tracking/test_tracking.py"),
    *(f"parallel/test_{name}.py" for name in ("complex", "expert_layouts", "experts", "pipeline")),
    *("parallel/test_torch_utilities.py", "parallel/test_probe_optimizer.py", "transfer/test_faults_collectives.py"),
    "torch_compat/test_strategies.py",
)


def house_of(path: str) -> str:
    """The key of HOUSES to which a file or folder of the package belongs, or "" for the core."""
    return next((house for house, parts in HOUSES.items() if path.startswith(parts)), "")


def imported(source: Path) -> set[str]:
    """The files of the package that a file imports, also in its functions and for its types, as path in the package."""
    found = set[str]()
    for node in ast.walk(ast.parse(source.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("meshwise."):
            module = str(node.module).removeprefix("meshwise.").replace(".", "/")
            found |= {f"{module}/{alias.name}" for alias in node.names} | {module}
        elif isinstance(node, ast.Import):
            found |= {name.name.removeprefix("meshwise.").replace(".", "/") for name in node.names}
    return {f"{name}/" if (SOURCES / name).is_dir() else f"{name}.py" for name in found}


def test_no_file_imports_a_house_that_it_does_without() -> None:
    wrong = []
    for source in sorted(SOURCES.rglob("*.py")):
        path = source.relative_to(SOURCES).as_posix()
        own = house_of(path)
        for name in sorted(imported(source)):
            house = house_of(name)
            if house and house != own and house not in MAY_IMPORT.get(own, ()):
                wrong.append(f"{path} imports {name} of {house}")
    assert not wrong


def without(houses: Iterable[str], folder: Path) -> dict[str, str]:
    """Settings of a process that has the package without these houses. folder: for the copy."""
    shutil.copytree(SOURCES, folder / "meshwise", ignore=shutil.ignore_patterns("__pycache__"))
    for part in (part for house in houses for part in HOUSES[house]):
        place = folder / "meshwise" / part
        assert place.exists(), part
        shutil.rmtree(place) if place.is_dir() else place.unlink()
    return {**os.environ, "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}


def test_a_part_that_is_gone_cannot_be_imported(tmp_path: Path, processes: None) -> None:
    command = [sys.executable, "-c", "import meshwise.checker"]
    assert subprocess.run(command, env=without(["checker"], tmp_path), cwd=tmp_path, capture_output=True).returncode


@pytest.mark.slow
@pytest.mark.workers
@pytest.mark.parametrize("house", HOUSES)
def test_a_run_does_without(house: str, tmp_path: Path, processes: None) -> None:
    settings = without([house], tmp_path)
    run = "import sys, meshwise; from meshwise.cli import main; main()"
    words = ["run", "mnist-mlp", "--devices", "2xcpu", "--epochs", "1", "--batch-size", "4096"]
    done = subprocess.run(
        [sys.executable, "-c", run, *words], env=settings, cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert any((tmp_path / "runs").iterdir())


@pytest.mark.slow
@pytest.mark.workers
def test_the_core_does_without_all_of_them(tmp_path: Path, processes: None) -> None:
    settings, tests = without(HOUSES, tmp_path), Path(__file__).parent
    left_out = [f"--ignore={tests / name}" for name in (*OF_HOUSES, *USE_A_HOUSE)]
    command = [sys.executable, "-m", "pytest", "-q", "-n", "2", "--dist", "loadfile", "-p", "no:cacheprovider"]
    command += ["-m", "not workers and not seconds and not slow and not night", *left_out, str(tests)]
    done = subprocess.run(command, env=settings, cwd=tests.parent, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
