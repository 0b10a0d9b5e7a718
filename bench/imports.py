"""CUDA builds of torch and forks: whether any module of ours spoils the forks that follow (rung R1 of the evidence).

    python bench/imports.py PYTHON:FAKE ...    interpreters with a CUDA wheel, each with its fake: tests/cuda/build.py

Imports every module in one process, without a GPU and with two fake ones, forks after each room, and asks the child
whether CUDA would refuse it (tests/every_import.py). Then trains an epoch of mnist-mlp on two fake GPUs.

Claim: no module spoils a fork, and the epoch ends, in torch 2.11, 2.13 and 2.15.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from keep import keep

ROOT = Path(__file__).parents[1]
VERSION = "import torch; print(torch.__version__)"


def looked_at(python: str, fake: Path) -> dict[str, Any]:
    """What holds for one build of torch."""

    def run(*words: str, devices: int) -> str:
        paths = {"LD_LIBRARY_PATH": str(fake), "PYTHONPATH": f"{fake}/site:{ROOT}/src:{ROOT}"}
        settings = os.environ | paths | {"FAKE_CUDA_DEVICES": str(devices)}
        with tempfile.TemporaryDirectory() as folder:
            done = subprocess.run(
                [python, *words], cwd=folder, env=settings, capture_output=True, text=True, timeout=600
            )
        return done.stdout if done.returncode == 0 else f"failed: {(done.stdout + done.stderr)[-500:]}"

    spoilt = {devices: run("-m", "tests.every_import", "cuda", devices=devices) for devices in (0, 2)}
    epoch = run("-m", "meshwise", "run", "mnist-mlp", "--devices", "2xcuda", "--epochs", "1", devices=2)
    accuracy = re.search(r"test accuracy (\S+) %", epoch)
    return {
        "torch": run("-c", VERSION, devices=0).strip(),
        "imported without a GPU, then forked": spoilt[0].strip(),
        "imported with two fake GPUs, then forked": spoilt[2].strip(),
        "mnist-mlp, 2xcuda, one epoch": f"accuracy {accuracy[1]} %" if accuracy else epoch,
    }


if __name__ == "__main__":
    pairs = [word.rsplit(":", 1) for word in sys.argv[1:]]
    found = [looked_at(python, Path(fake).resolve()) for python, fake in pairs]
    for facts in found:
        print("\n".join(f"{name}: {value}" for name, value in facts.items()), end="\n\n")
    if found:
        keep("imports", {"builds": found})
