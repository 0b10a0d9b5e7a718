"""Seconds from a planted fault on rank 1 to the end of the command, and who is left over.

    python bench/faults.py

Claim: within 5 s for each fault, with a non-zero exit code and no orphans. The worker writes down when it happens.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from keep import keep

FAULTS = ("raises", "is_killed", "exits", "exits_at_once", "leaves_others", "out_of_memory", "not_a_number")
JOBS = Path(__file__).parents[1] / "tests" / "faults" / "jobs_that_fail.py"


def measure(fault: str) -> dict[str, Any]:
    """Run the job that fails this way on two workers."""
    with tempfile.TemporaryDirectory() as out:
        stamp = Path(out) / "stamp"
        command = [
            sys.executable,
            "-m",
            "meshwise",
            "run",
            f"{JOBS}:job_{fault}",
            "--devices",
            "2xcpu",
            "--out",
            out,
            "--log-every",
            "10",
        ]
        done = subprocess.run(command, env=os.environ | {"FAULT_STAMP": str(stamp)}, capture_output=True, text=True)
        end = time.time()
        return {"seconds": end - float(stamp.read_text()), "exit_code": done.returncode, "left_over": left_over()}


def left_over() -> int:
    """Worker processes that still live."""
    found = subprocess.run(["pgrep", "-f", "meshwise.workers"], capture_output=True, text=True)
    return len(found.stdout.split())


def main() -> None:
    """Measure, print, keep."""
    result: dict[str, Any] = {"claim": "within 5 s of the fault, exit code not 0, nobody left over"}
    for fault in FAULTS:
        result[fault] = measure(fault)
        seconds, code, left = (result[fault][key] for key in ("seconds", "exit_code", "left_over"))
        print(f"{fault:14} {seconds:.2f} s  exit code {code}  left over {left}", flush=True)
    keep("faults", result)


if __name__ == "__main__":
    main()
