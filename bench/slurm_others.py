"""Beside bench/slurm.py: what Lightning's own requeue, and torchrun with a snapshot, make of the same events.

    PYTHON=/where/lightning/is/bin/python python bench/slurm_others.py        as root on Linux

Four ranks on two nodes of a real Slurm, float64, the model and data of bench/slurm_jobs.py, 300 steps. The batch script
has `#SBATCH --requeue` and one srun; ours asks for another start after exit code 85, theirs has nothing to ask by.
Told, not claimed: how often the job was started, how it ended, and how many steps were done more than once. Their
numbers are not compared: with two samples a rank, batch norm and Adam make much of a rounding, and torchrun's ranks
change places.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from keep import keep
from slurm import STEPS, _until

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.slurm import Slurm, slurm, why_not

PYTHON = os.environ.get("PYTHON", sys.executable)
JOBS = Path(__file__).with_name("slurm_others_jobs.py")
LIMIT = 150.0  # seconds for each thing that a row waits for
OVER = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")
TORCHRUN = (
    "srun --ntasks=2 --ntasks-per-node=1 {python} -m torch.distributed.run --nnodes 2 --nproc-per-node 2 "
    "--rdzv-backend c10d --rdzv-id $SLURM_JOB_ID --rdzv-endpoint $(scontrol show hostnames | head -1):29400 "
    "{jobs} snapshot {folder}"
)
TOOLS = {
    "lightning (USR1)": "srun --ntasks-per-node=2 {python} {jobs} lightning {folder} USR1",
    "lightning (TERM)": "srun --ntasks-per-node=2 {python} {jobs} lightning {folder} TERM",
    "torchrun, snapshot": TORCHRUN,
}
EVENTS = ("none", "warned", "requeue")


def row(tool: str, event: str, folder: Path) -> dict[str, Any]:
    """Send the job, let the event happen at step 75, and tell what became of it."""
    facts: dict[str, Any] = {"tool": tool, "event": event}
    with slurm(2, kill_wait=10) as cluster:
        line = TOOLS[tool].format(python=PYTHON, jobs=JOBS, folder=folder)
        script = f"#!/bin/bash\n#SBATCH -N2 --ntasks-per-node=2 --requeue --open-mode=append --time=20\n{line}\n"
        (folder / "batch.sh").write_text(script)
        done = cluster.call("sbatch", "--parsable", "-o", "out.txt", "batch.sh", folder=folder, BENCH_PAUSE="0.05")
        job = done.stdout.strip()
        _until(lambda: _steps(folder) >= 75 or _over(cluster, job), "it never trained", LIMIT)
        if event == "warned":
            signal = "TERM" if "TERM" in tool else "USR1"
            cluster.call("scancel", f"--signal={signal}", job)
        elif event == "requeue":
            cluster.call("scontrol", "requeue", job)
        if event != "none":
            time.sleep(5)
        _until(lambda: _over(cluster, job), "it had not ended", LIMIT)
        time.sleep(3)
        _until(lambda: _over(cluster, job), "it had not ended", LIMIT)
        found = cluster.facts(job)
    facts |= {"starts": int(found.get("Restarts", "0")) + 1, "ended": found["JobState"], "steps": _steps(folder)}
    facts["again"] = max(0, facts["steps"] - STEPS) if (folder / "last.pt").exists() else None
    facts["finished"] = (folder / "last.pt").exists()
    return facts


def _steps(folder: Path) -> int:
    path = folder / "steps.jsonl"
    return path.read_text().count("\n") if path.exists() else 0


def _over(cluster: Slurm, job: str) -> bool:
    return cluster.facts(job).get("JobState") in OVER


def rows_of(tool: str, folder: Path) -> list[dict[str, Any]]:
    """Every event for one tool, the undisturbed run first."""
    rows: list[dict[str, Any]] = []
    for event in EVENTS:
        here = folder / f"{list(TOOLS).index(tool)}-{event}"
        here.mkdir()
        try:
            found = row(tool, event, here)
        except AssertionError as error:
            found = {"tool": tool, "event": event, "steps": _steps(here), "finished": False, "wrong": str(error)}
        if not found["finished"]:
            print("  " + (here / "out.txt").read_text()[-600:].replace("\n", "\n  "), flush=True)
        print(json.dumps(found), flush=True)
        rows.append(found)
    return rows


def main() -> None:
    """Every tool with every event, the tools side by side, and keep what came of it."""
    if (why := why_not()) is not None:
        sys.exit(why)
    with (
        tempfile.TemporaryDirectory(prefix="slurm-bench-", ignore_cleanup_errors=True) as made,
        ThreadPoolExecutor(len(TOOLS)) as pool,
    ):
        found = list(pool.map(lambda tool: rows_of(tool, Path(made)), TOOLS))
    keep("slurm_others", {"rows": [row for rows in found for row in rows], "steps": STEPS})


if __name__ == "__main__":
    main()
