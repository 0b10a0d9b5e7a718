"""Does the command line answer at once, and does a script start as soon as under torchrun?

    python bench/startup.py [--before 32efb86] [--rounds 10]

Claims: the help of every command takes less than 0.5 s; a script's first line on two workers comes at most 1 s later
than under torchrun; what every training script does first, an import of torch and a step of an optimizer, is done no
later than there. `before` is the source of that commit, measured in turns with the present one. Seconds are wall
times and so need a quiet machine; seconds of CPU, of the command and its workers, do not.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
from pathlib import Path

from keep import keep

ROOT = Path(__file__).resolve().parents[1]
HELPS = ("", "devices", "bench", "run", "check", "report", "runs")
BEFORE = ("meshwise --help", "meshwise run --help", "meshwise report RUN", "meshwise run")
"""What is measured with the earlier source too."""
RUN = ROOT / "tests" / "old" / "runs" / "finished"
SCRIPT = """import sys, time
print("first line", repr(time.time()), flush=True)
sys.exit(0)
"""
STEP = """import sys, time
import torch
weight = torch.nn.Parameter(torch.zeros(2))
torch.optim.SGD([weight], lr=0.1).step()
print("first line", repr(time.time()), flush=True)
sys.exit(0)
"""


def seconds(words: list[str], source: Path, folder: Path) -> tuple[float, float, float]:
    """Wall time and CPU time of one command, and when its first line came, 0 without one; all in seconds."""
    environment = os.environ | {"PYTHONPATH": str(source), "OMP_NUM_THREADS": "1"}
    used, began = _cpu(), time.time()
    done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, check=True)
    wall, cpu = time.time() - began, _cpu() - used
    lines = [line.split()[-1] for line in done.stdout.splitlines() if "first line" in line]
    return wall, cpu, float(lines[0]) - began if lines else 0.0


def _cpu() -> float:
    spent = resource.getrusage(resource.RUSAGE_CHILDREN)
    return spent.ru_utime + spent.ru_stime


def commands(folder: Path) -> dict[str, list[str]]:
    """What is timed with each source, by name."""
    meshwise = [sys.executable, "-m", "meshwise"]
    helps = {f"meshwise {name} --help".replace("  ", " "): [*meshwise, *name.split(), "--help"] for name in HELPS}
    report = {"meshwise report RUN": [*meshwise, "report", str(RUN)]}
    two = [*meshwise, "run", "--devices", "2xcpu"]
    runs = {"meshwise run": [*two, str(folder / "tiny.py")], "meshwise run, a step": [*two, str(folder / "step.py")]}
    return helps | report | runs


def main() -> None:
    """Measure, print, keep."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--before", default="32efb86")
    parser.add_argument("--rounds", type=int, default=10)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "tiny.py").write_text(SCRIPT)
        (folder / "step.py").write_text(STEP)
        archive = subprocess.run(["git", "archive", asked.before, "src"], cwd=ROOT, check=True, capture_output=True)
        with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as tar:
            tar.extractall(folder / "before", filter="data")
        sources = {"before": folder / "before" / "src", "after": ROOT / "src"}
        timed = {(what, when): words for what, words in commands(folder).items() for when in sources}
        timed = {(what, when): words for (what, when), words in timed.items() if when == "after" or what in BEFORE}
        timed["import torch", "after"] = [sys.executable, "-c", "import torch"]
        runner = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
        timed["torchrun", "after"] = [*runner, "--master-port", "0", str(folder / "tiny.py")]
        timed["torchrun, a step", "after"] = [*runner, "--master-port", "0", str(folder / "step.py")]
        found: dict[tuple[str, str], list[tuple[float, float, float]]] = {key: [] for key in timed}
        with contextlib.suppress(KeyboardInterrupt):  # a Ctrl-C keeps the rounds that are done
            for rounds in range(asked.rounds + 1):
                took = {key: seconds(words, sources[key[1]], folder) for key, words in timed.items()}
                shutil.rmtree(folder / "runs", ignore_errors=True)
                for key, times in took.items() if rounds else ():  # the first round reads files from the disk
                    found[key].append(times)
                print(f"round {rounds} of {asked.rounds}", flush=True)
    result: dict[str, dict[str, dict[str, float]]] = {}
    for (what, when), times in found.items():
        wall, cpu, first = (round(statistics.median(column), 2) for column in zip(*times, strict=True))
        figures = {"seconds": wall, "seconds of CPU": cpu} | ({"to the first line": first} if first else {})
        result.setdefault(what, {})[when] = figures
        print(f"{what:28} {when:7}", figures)
    counted = len(found["import torch", "after"])
    keep("startup", result | {"rounds": counted, "before": asked.before, "load": os.getloadavg()[0]})  # type: ignore[arg-type]


if __name__ == "__main__":
    main()
