"""The quick part of the tests on three Pythons and three versions of torch, each cell in an environment of its own.

    python bench/matrix.py                          # make matrix: every cell that has no result for this commit
    python bench/matrix.py --only 3.12 2.11.0       # one cell
    python bench/matrix.py --wheels FOLDER          # take torch from a folder of wheels first
    python bench/matrix.py --behind "nice -n 19"    # what the tests are started with

Each cell's result is written as it comes, so a run that was cut off goes on. A cell that cannot be tried is named with
its reason: no such Python, or an install that fails. Where the wheel of torch is a CUDA build, it is installed alone:
the fake libraries of tests/cuda, with no device, replace NVIDIA's (3 GB).

Claim: no cell fails.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULT = ROOT / "bench" / "results" / "matrix.json"
PYTHONS = ("3.11", "3.12", "3.13")
TORCHES = ("2.11.0", "2.13.0", "2.15.0")
QUICK = ("-m", "not workers and not seconds and not slow", "--hypothesis-profile=quick", "-p", "no:cacheprovider")


class Missing(Exception):
    """A cell that cannot be tried, with the reason."""


def run(*words: object, settings: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Run a command in the checkout and keep what it printed."""
    return subprocess.run(
        [str(word) for word in words], cwd=ROOT, env=os.environ | (settings or {}), capture_output=True, text=True
    )


def interpreter(version: str) -> str:
    """A Python of this version: on the path, or one of pyenv's. Raises Missing."""
    places = [shutil.which(f"python{version}"), *map(str, Path.home().glob(f".pyenv/versions/{version}.*/bin/python"))]
    for place in filter(None, places):
        done = run(place, "-c", "import sys, venv, ensurepip; print('{}.{}'.format(*sys.version_info))")
        if done.returncode == 0 and done.stdout.strip() == version:
            return str(place)
    raise Missing(f"no Python {version} with venv on this machine")


def environment(folder: Path, python: str, torch: str, wheels: Path | None) -> tuple[Path, dict[str, str]]:
    """The interpreter of a new environment with this torch and the tested versions of all else, and its settings."""
    run(python, "-m", "venv", folder)
    inside = folder / "bin" / "python"
    others = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("torch==")]
    constraints = folder / "constraints.txt"
    constraints.write_text("\n".join(others) + "\n")
    pip = {"PIP_CONSTRAINT": str(constraints)}

    def install(*words: object) -> None:
        done = run(inside, "-m", "pip", "install", "-q", "--no-deps", *words, settings=pip)
        if done.returncode:
            raise Missing("cannot be installed: " + (done.stderr.strip().splitlines() or ["pip failed"])[-1])

    found = ["--find-links", wheels] if wheels else []
    install(*found, f"torch=={torch}")
    install("-r", constraints, "setuptools", "hatchling", "editables", "trove-classifiers")
    install("--no-build-isolation", "-e", ROOT)
    if not any(folder.glob("lib/python*/site-packages/torch/lib/libtorch_cuda.so")):
        return inside, {}
    headers, fake = folder / "headers", folder / "fake"
    install("--target", headers, "nvidia-cuda-runtime==13.0.*", "nvidia-cuda-crt==13.0.*")
    built = run(inside, ROOT / "tests" / "cuda" / "build.py", fake, headers)
    if built.returncode:
        raise Missing("no fake CUDA: " + (built.stderr.strip().splitlines() or ["tests/cuda/build.py failed"])[-1])
    return inside, {
        "LD_LIBRARY_PATH": str(fake),  # without its site, which turns fused attention off
        "FAKE_CUDA_DEVICES": "0",
    }


def cell(version: str, torch: str, given: argparse.Namespace) -> dict[str, Any]:
    """Install and test one cell. What it found, or why it was not tried."""
    with tempfile.TemporaryDirectory() as name:
        try:
            inside, settings = environment(Path(name) / "venv", interpreter(version), torch, given.wheels)
        except Missing as reason:
            return {"missing": str(reason)}
        settings = {"PYTHONPATH": str(ROOT / "src"), "PYTHONDONTWRITEBYTECODE": "1"} | settings
        names = run(
            inside,
            "-c",
            "import platform, torch; print(platform.python_version(), torch.__version__)",
            settings=settings,
        )
        if names.returncode:
            return {"missing": "torch does not import: " + names.stderr.strip().splitlines()[-1]}
        began = time.time()
        tested = run(
            *given.behind.split(), inside, "-m", "pytest", "-q", "-n", given.workers, *QUICK, settings=settings
        )
    last = (tested.stdout.strip().splitlines() or tested.stderr.strip().splitlines() or [""])[-1].strip("= ")
    if not re.search(r"\d+ (?:passed|failed|errors?)\b", last):
        return {"missing": f"the tests were cut off (exit code {tested.returncode}): {last[:200]}"}
    exact, build = names.stdout.split()
    return {
        "python": exact,
        "torch": build,
        "seconds": round(time.time() - began),
        "tests": last,
        "failed": re.findall(r"^(?:FAILED|ERROR) (\S+)", tested.stdout, re.MULTILINE),
        "passed": tested.returncode == 0,
    }


def main() -> None:
    """Run the cells that have no result for this commit, and print all of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs=2, metavar=("PYTHON", "TORCH"))
    parser.add_argument("--wheels", type=Path)
    parser.add_argument("--workers", default="2", help="of pytest")
    parser.add_argument("--behind", default="", metavar="COMMAND")
    given = parser.parse_args()
    commit = run("git", "rev-parse", "--short", "HEAD").stdout.strip()
    for torch in TORCHES:
        for version in PYTHONS:
            name = f"Python {version}, torch {torch}"
            cells: dict[str, Any] = json.loads(RESULT.read_text())["cells"] if RESULT.exists() else {}
            done = cells.get(name, {})
            if given.only and tuple(given.only) != (version, torch):
                continue
            if not given.only and done.get("commit") == commit and "missing" not in done:
                continue
            today = datetime.now(UTC).date().isoformat()
            cells[name] = cell(version, torch, given) | {"commit": commit, "date": today}
            RESULT.write_text(json.dumps({"cells": dict(sorted(cells.items()))}, indent=2) + "\n")
            print(f"{name}: {cells[name].get('missing') or cells[name]['tests']}", flush=True)
    cells = json.loads(RESULT.read_text())["cells"] if RESULT.exists() else {}
    sys.exit(any(not one.get("passed", True) for one in cells.values()))


if __name__ == "__main__":
    main()
