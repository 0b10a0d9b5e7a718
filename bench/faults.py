"""What a fault costs a run: rehearsed with `--fault`, and judged by the numbers of the run that was never disturbed.

    python bench/faults.py                     every row three times
    python bench/faults.py --only kill --repeat 1 --plans data=2

Claim: each fault of a machine happens, is noticed within 1 s (a hang at its limit, here 4 s) and answered by the run
itself; its last parameters and its losses are bitwise those of the undisturbed run under the same plan, and no worker
is left over. What programs do ends them within 5 s with exit code 1. A row whose fault did not happen has failed.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path
from statistics import median
from typing import Any

import psutil
from keep import keep

TESTS = Path(__file__).parents[1] / "tests" / "faults"
ENDS = ("raises", "is_killed", "exits", "exits_at_once", "leaves_others", "out_of_memory", "not_a_number")
PLANS = {"data=2": 2, "shard=2": 2, "data=3": 3, "data=2 shard=2": 4}
"""Settings of the plan, and devices."""
PHASES = ("data", "forward", "backward", "communication", "optimizer", "evaluate", "checkpoint")
MARK = "MESHWISE_BENCH_RUN"
LIMIT = 300.0  # seconds of a run


def rows(ranks: int) -> dict[str, list[str]]:
    """Name of a row -> the options of its run. Steps 12 and 15 are saved and evaluated."""
    last = ranks - 1
    found = {}
    for phase in PHASES:
        step = 12 if phase == "checkpoint" else 15
        found[f"kill in {phase}"] = [f"--fault=kill:rank={last},step={step},phase={phase}"]
    found["kill of rank 0"] = ["--fault=kill:rank=0,step=14,phase=backward"]
    found["kill in step 1"] = [f"--fault=kill:rank={last},step=1"]
    found["kill twice"] = [f"--fault=kill:rank={last},step=7", "--fault=kill:rank=0,step=10,attempt=2"]
    found["exit"] = [f"--fault=exit:rank={last},step=14"]
    found["raise"] = [f"--fault=raise:rank={last},step=14", "--restart-on=exception"]
    found["oom"] = [f"--fault=oom:rank={last},step=14,phase=backward", "--restart-on=exception"]
    found["hang"] = [f"--fault=hang:rank={last},step=14", "--hang-limit=4s"]
    found["stop"] = [f"--fault=stop:rank={last},step=14,phase=backward", "--hang-limit=4s"]
    return found


def run(out: Path, job: str, *words: str) -> dict[str, Any]:
    """One run: its exit code, its folder, what it printed, its processes that are left over."""
    mark = uuid.uuid4().hex
    command = [sys.executable, "-m", "meshwise", "run", job, *words, "--out", str(out)]
    environment = os.environ | {MARK: mark, "FAULT_STAMP": str(out / "stamp")}
    out.mkdir(parents=True, exist_ok=True)
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LIMIT)
        code, text = done.returncode, done.stdout + done.stderr
    except subprocess.TimeoutExpired:
        code, text = -1, f"not over after {LIMIT:.0f} s"
    folder = next((path.parent for path in out.glob("*/run.json")), out)
    return {"code": code, "folder": folder, "text": text, "end": time.time(), "left_over": left_over(mark)}


def left_over(mark: str) -> int:
    """Processes of the run that still live; they are ended."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == mark:
                found.append(process)
        except (psutil.Error, OSError):
            continue
    for process in found:
        process.kill()
    return len(found)


def numbers(folder: Path) -> str:
    """A digest of the last parameters and of each step's loss."""
    weights, metrics = folder / "weights.safetensors", folder / "metrics.jsonl"
    if not weights.exists():
        return "none"
    return hashlib.sha256(weights.read_bytes() + metrics.read_bytes()).hexdigest()


def going_on(out: Path, plan: str, devices: int, words: list[str], undisturbed: str) -> dict[str, Any]:
    """A run with a fault, and what its record says of it."""
    done = run(out, f"{TESTS / 'job_with_state.py'}:job", *placed(plan, devices), *words)
    record = json.loads((done["folder"] / "run.json").read_text()) if done["folder"] != out else {}
    sessions = record.get("sessions", [])
    wanted = sum(word.startswith("--fault=") for word in words)
    happened = done["folder"] / "faults.jsonl"
    row = {
        "happened": happened.exists() and len(happened.read_text().splitlines()) == wanted,
        "exit_code": done["code"],
        "attempts": len(sessions),
        "seconds_to_detect": [s["seconds_to_detect"] for s in sessions if "seconds_to_detect" in s],
        "seconds_to_step": [s["seconds_to_step"] for s in sessions if "seconds_to_step" in s],
        "steps_lost": [s["steps_lost"] for s in sessions if "steps_lost" in s],
        "bitwise": numbers(done["folder"]) == undisturbed,
        "left_over": done["left_over"],
    }
    row["held"] = bool(row["happened"] and row["bitwise"] and not row["exit_code"] and not row["left_over"])
    return row if row["held"] else row | {"said": done["text"][-600:]}


def placed(plan: str, devices: int) -> list[str]:
    """The options of a plan."""
    settings = [word for setting in plan.split() for word in ("--set", setting)]
    return ["--devices", f"{devices}xcpu", *settings, "--save-every", "4", "--restarts", "3"]


def ending(out: Path, fault: str) -> dict[str, Any]:
    """A job that fails this way on two workers, and is not started again: seconds from the fault to the end."""
    words = ["--devices", "2xcpu", "--log-every", "10", "--restarts", "0"]
    done = run(out, f"{TESTS / 'jobs_that_fail.py'}:job_{fault}", *words)
    seconds = done["end"] - float((out / "stamp").read_text())
    return {"seconds": seconds, "exit_code": done["code"], "left_over": done["left_over"]}


def measured(plans: list[str], only: str, repeat: int) -> dict[str, Any]:
    """Every row of every plan, `repeat` times, in turn."""
    found: dict[str, Any] = {}
    for plan in plans:
        with tempfile.TemporaryDirectory() as folder:
            whole = run(Path(folder), f"{TESTS / 'job_with_state.py'}:job", *placed(plan, PLANS[plan]))
            undisturbed = numbers(whole["folder"])
        for name, words in rows(PLANS[plan]).items():
            if only not in name:
                continue
            tries = []
            for _ in range(repeat):
                with tempfile.TemporaryDirectory() as folder:
                    tries.append(going_on(Path(folder), plan, PLANS[plan], words, undisturbed))
            found[f"{plan}: {name}"] = tries
            print(f"{plan:16} {name:22} {shown(tries)}", flush=True)
    return found


def shown(tries: list[dict[str, Any]]) -> str:
    """How many of the tries held, and their medians."""

    def middle(name: str) -> str:
        values = [value for one in tries for value in one[name]]
        return f"{median(values):.2f}" if values else "?"

    held = f"{sum(one['held'] for one in tries)} of {len(tries)}"
    times = f"noticed {middle('seconds_to_detect')} s  steps again {middle('seconds_to_step')} s"
    return f"held {held}  {times}  steps lost {middle('steps_lost')}"


def main() -> None:
    """Measure, print, keep."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", default="", help="rows with this in their name")
    parser.add_argument("--plans", nargs="*", default=[*PLANS])
    parser.add_argument("--repeat", type=int, default=3)
    given = parser.parse_args()
    result: dict[str, Any] = {"claim": (__doc__ or "").partition("Claim: ")[2].strip().replace("\n", " ")}
    if not given.only:
        result["ends"] = {}
        for fault in ENDS:
            with tempfile.TemporaryDirectory() as folder:
                result["ends"][fault] = row = ending(Path(folder), fault)
            print(f"{fault:16} {row['seconds']:.2f} s  exit code {row['exit_code']}", flush=True)
    result["goes_on"] = measured(given.plans, given.only, given.repeat)
    keep("faults", result)


if __name__ == "__main__":
    main()
