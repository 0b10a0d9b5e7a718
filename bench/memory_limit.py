"""A step that runs out of memory: no step is lost, and the losses are those of the run that had enough.

    python bench/memory_limit.py [--jobs resnet,pairs] [--plans data=2,shard=2] [--phases forward]

Each job runs 50 steps in float64 on two CPU workers under each plan, once undisturbed, and once for each phase in which
one rank runs out of memory in step 25. Kept are the largest difference of a loss over all steps, the steps that were
done again, and how the plan was changed. The built-in jobs are among them. `--more` goes on where it ended: what the
result has is not run again.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from keep import keep

from meshwise.records import folder as names
from meshwise.records.files import read_lines

HERE = Path(__file__).parent
RESULT = HERE / "results" / "memory_limit.json"
JOBS = ("perceptrons", "resnet", "transformer", "pairs", "mlp", "gpt", "mnist_mlp", "mnist_cnn")
PLANS = ("data=2", "shard=2")
PHASES = ("forward", "backward", "communication", "optimizer")
STEP = 25


def run(job: str, plan: str, out: Path, *words: str) -> Path:
    """One run; its folder."""
    source = f"{HERE / 'memory_jobs.py'}:{job}"
    command = [sys.executable, "-m", "meshwise", "run", source, "--devices", "2xcpu", "--precision", "fp64"]
    command += ["--set", plan, "--redundancy", "1", "--log-every", "10", "--out", str(out), *words]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ, timeout=600, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stdout}{done.stderr}")
    (folder,) = out.iterdir()
    return folder


def losses(folder: Path) -> dict[int, float]:
    """By step."""
    return {line["step"]: line["loss"] for line in read_lines(folder / names.METRICS) if "loss" in line}


def compared(row: dict[str, Any], phases: Sequence[str], scratch: Path) -> Iterator[str]:
    """The undisturbed run beside one for each phase, which is put into `row` before it is given."""
    job, plan = row["job"], row["plan"]
    whole = losses(run(job, plan, scratch / "whole"))
    row["steps"] = len(whole)
    for phase in phases:
        folder = run(job, plan, scratch / phase, "--fault", f"oom:rank=1,step={STEP},phase={phase}")
        mine, sessions = losses(folder), names.read_run(folder)["sessions"]
        assert len(sessions) == 2 and mine.keys() == whole.keys(), (folder, len(sessions), len(mine), len(whole))
        text = (folder / names.PLAN).read_text()
        row["phases"][phase] = {
            "difference": max(abs(mine[step] - whole[step]) for step in whole),
            "steps_lost": sessions[1]["steps_lost"],
            "now": [line for line in text.splitlines() if line.startswith(("accumulate", "recompute"))],
        }
        yield phase


def main() -> None:
    """Run them; what is known is kept after each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", default=",".join(JOBS))
    parser.add_argument("--plans", default=",".join(PLANS))
    parser.add_argument("--phases", default=",".join(PHASES))
    parser.add_argument("--show", action="store_true", help="write no result")
    parser.add_argument("--more", action="store_true", help="keep what the result has, and run what it lacks")
    given = parser.parse_args()
    rows: list[dict[str, Any]] = []
    if given.more and RESULT.is_file():
        rows = json.loads(RESULT.read_text())["rows"]
    for job in given.jobs.split(","):
        for plan in given.plans.split(","):
            row = next((row for row in rows if (row["job"], row["plan"]) == (job, plan)), None)
            if row is None:
                row = {"job": job, "plan": plan, "phases": {}}
                rows.append(row)
            left = [phase for phase in given.phases.split(",") if phase not in row["phases"]]
            if not left:
                continue
            with tempfile.TemporaryDirectory() as scratch:
                for phase in compared(row, left, Path(scratch)):
                    print(job, plan, phase, row["phases"][phase], flush=True)
                    if not given.show:
                        keep("memory_limit", result_of(rows))


def result_of(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What is kept, with the worst of all rows first."""
    phases = [phase for row in rows for phase in row["phases"].values()]
    most = {f"most_{name}": max(phase[name] for phase in phases) for name in ("difference", "steps_lost")}
    return {**most, "runs": len(phases), "rows": [row for row in rows if row["phases"]]}


if __name__ == "__main__":
    main()
