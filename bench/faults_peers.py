"""The same faults beside torchrun with DDP and torch.distributed.checkpoint: what is noticed, and what is lost.

    python bench/faults_peers.py

Both sides have two CPU workers, save every fourth step, may start again three times, and meet the fault in step 15.
The peer is a loop as its documentation has it (bench/faults_peer_script.py), which goes on from the newest checkpoint.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from faults import CASES, ROWS, job_of, numbers, run, tried
from keep import keep

SCRIPT = Path(__file__).with_name("faults_peer_script.py")
LIMIT = 120.0
"""Seconds after which a run that does not go on is ended."""
PEER = ("kill", "exit", "stop", "nan", "bit of a parameter", "bit of a checkpoint")
OURS = {
    "kill": "kill in forward",
    "exit": "exit",
    "stop": "stop",
    "nan": "nan",
    "bit of a parameter": "bitflip",
    "bit of a checkpoint": "corrupt-checkpoint",
}
"""Rows of bench/faults.py."""


def peer(fault: str, undisturbed: dict[str, Any] | None) -> dict[str, Any]:
    """The peer's run with a fault: what it did, beside the one that was never disturbed."""
    with tempfile.TemporaryDirectory() as name:
        out = Path(name)
        command = ["torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=3", str(SCRIPT)]
        facts = {"PEER_OUT": name, "FAULT": fault, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        with subprocess.Popen(
            [sys.executable, "-m", *command], env=os.environ | facts, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        ) as process:
            try:
                process.communicate(timeout=LIMIT)
                code: int | None = process.returncode
            except subprocess.TimeoutExpired:
                _end(process)
                code = None
        ended = time.time()
        lines = [json.loads(line) for line in (out / "steps0.jsonl").read_text().splitlines()]
        stamp = float((out / "stamp").read_text()) if (out / "stamp").exists() else None
        last = out / "last.pt"
        state = torch.load(last) if last.exists() else None
    after = [line for line in lines if line["again"]]
    row: dict[str, Any] = {"exit_code": code, "state": state}
    if undisturbed is None or stamp is None:
        return row
    theirs = undisturbed["state"]
    same = state is not None and all(torch.equal(state[key], theirs[key]) for key in theirs)
    row |= {"same_numbers": same, "went_on": bool(after), "seconds": ended - stamp}
    if after:
        row |= {"seconds_to_step": after[0]["time"] - stamp, "steps_again": 15 - after[0]["step"]}
    return row


def _end(process: subprocess.Popen[bytes]) -> None:
    """End torchrun and its workers, a stopped one too."""
    import psutil

    for child in [*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)]:
        child.kill()
    process.communicate()


def ours(fault: str) -> dict[str, Any]:
    """Ours: the row of bench/faults.py, under data=2, or data=3 where two replicas cannot tell which is wrong."""
    row = next(row for row in ROWS if row.name == OURS[fault])
    case = next(case for case in CASES if case.technique == "data" and case.ranks == max(2, row.replicas))
    with tempfile.TemporaryDirectory() as folder:
        undisturbed = numbers(run(Path(folder), job_of(case), *case.words())["folder"])
    return tried(row, case, 1, undisturbed)


def main() -> None:
    """Measure, print, keep."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", default="")
    given = parser.parse_args()
    undisturbed, rows = peer("", None), {}
    assert undisturbed["exit_code"] == 0
    for fault in [fault for fault in PEER if given.only in fault]:
        theirs, own = peer(fault, undisturbed), ours(fault)
        theirs.pop("state")
        rows[fault] = {"torchrun": theirs, "meshwise": own}
        print(f"{fault:20} torchrun {theirs}", flush=True)
        facts = {key: own[key] for key in ("held", "seconds_to_detect", "seconds_to_step", "steps_lost")}
        print(f"{'':20} meshwise {facts}", flush=True)
    keep("faults_peers", {"limit_seconds": LIMIT, "rows": rows})


if __name__ == "__main__":
    main()
