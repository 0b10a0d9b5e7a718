"""The same faults beside torchrun with torch.distributed.checkpoint, Lightning and Ray Train: what each one notices,
and what it loses.

    python bench/faults_peers.py [--only kill] [--tries 3] [--peers torchrun lightning ray]
    pip install lightning "ray[train]"

All have two CPU workers, save every fourth step, may start again three times, and meet the fault in step 15. A peer is
a loop as its documentation has it (bench/faults_peer_*.py) that goes on from its newest checkpoint.
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
from keep import RESULTS, keep

HERE = Path(__file__).parent
ELASTIC = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=3")
PEERS = {
    "torchrun": (*ELASTIC, str(HERE / "faults_peer_script.py")),
    "lightning": (*ELASTIC, str(HERE / "faults_peer_lightning.py")),
    "ray": (str(HERE / "faults_peer_ray.py"),),
}
LIMIT = 300.0
"""Seconds after which a run that does not go on is ended."""
PEER = ("kill", "exit", "stop", "nan", "bit of a parameter")
OURS = {
    "kill": "kill in forward",
    "exit": "exit",
    "stop": "stop",
    "nan": "nan",
    "bit of a parameter": "bitflip",
}
"""Rows of bench/faults.py."""
OWN = ("held", "seconds_to_detect", "seconds_to_step", "steps_lost")


def peer(name: str, fault: str, undisturbed: dict[str, Any] | None) -> dict[str, Any]:
    """The peer's run with a fault: what it did, beside the one that was never disturbed."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder)
        facts = {"PEER_OUT": folder, "FAULT": fault, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        with subprocess.Popen(
            [sys.executable, *PEERS[name]], env=os.environ | facts, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
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
    apart = None if state is None else max(float((state[key] - theirs[key]).abs().max()) for key in theirs)
    row |= {"same_numbers": apart == 0, "parameters_apart": apart, "went_on": bool(after), "seconds": ended - stamp}
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
    parser.add_argument("--peers", nargs="*", default=list(PEERS), choices=PEERS)
    parser.add_argument("--tries", type=int, default=1)
    given = parser.parse_args()
    path = RESULTS / "faults_peers.json"
    rows: dict[str, Any] = json.loads(path.read_text())["rows"] if path.exists() and given.only else {}
    peers = {name: peer(name, "", None) for name in given.peers}
    for name, undisturbed in peers.items():
        assert undisturbed["exit_code"] == 0, f"{name} does not run: pip install lightning 'ray[train]'"
    for fault in [fault for fault in PEER if given.only in fault]:
        row: dict[str, list[dict[str, Any]]] = {name: [] for name in [*peers, "meshwise"]}
        for _ in range(given.tries):
            for name, undisturbed in peers.items():
                row[name].append(peer(name, fault, undisturbed))
            own = ours(fault)
            row["meshwise"].append({key: own[key] for key in OWN})
        for name, tries in row.items():
            for one in tries:
                one.pop("state", None)
                print(f"{fault:20} {name:10} {one}", flush=True)
        rows[fault] = row
        keep("faults_peers", {"limit_seconds": LIMIT, "rows": rows})


if __name__ == "__main__":
    main()
