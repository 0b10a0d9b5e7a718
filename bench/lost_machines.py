"""What becomes of a run on three hosts when one of them is lost, or only its link, or one of its workers.

    python bench/lost_machines.py              every row, about 6 minutes; needs root (network namespaces)
    python bench/lost_machines.py --only cut

The hosts share a disk. Claim: the run goes on with those that are left, the host that kept the store included, and ends
with the parameters of the run that was never disturbed: bitwise on as many ranks, else within 1e-9 in float64. Every
step's loss is there once. Of two halves one goes on; the host that was cut off, or stopped and continued, ends with
exit code 85, and nothing that it writes is read.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from keep import keep  # noqa: E402
from safetensors.torch import load_file  # noqa: E402

from meshwise.records import folder as names  # noqa: E402
from meshwise.records.files import read_lines  # noqa: E402
from tests.hosts import INTERFACE, Host, hosts, why_not  # noqa: E402

JOB = ROOT / "tests" / "faults" / "job_with_state.py"
WORDS = ("--precision", "fp64", "--exact-random", "--save-every", "4", "--fault", "slow 400ms:rank=0,step=9")
STEPS, LIMIT = 20, 120.0


def launched(cluster: Sequence[Host], out: Path, *words: str) -> list[subprocess.Popen[bytes]]:
    """`meshwise run` on each host, with one worker there."""
    started = []
    for node, host in enumerate(cluster):
        command = [sys.executable, "-m", "meshwise", "run", f"{JOB}:job", "--devices", "1xcpu", *WORDS, *words]
        command += ["--nnodes", str(len(cluster)), "--node-rank", str(node), "--rdzv", f"{cluster[0].address}:29500"]
        with (out / f"host{node}.txt").open("wb") as log:
            variables = {"GLOO_SOCKET_IFNAME": INTERFACE, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
            started.append(host.popen([*command, "--out", str(out / "runs")], variables, stdout=log, stderr=log))
    return started


def saved(out: Path) -> None:
    """Wait until the state after step 8 is saved."""
    limit = time.monotonic() + LIMIT
    while not list((out / "runs").glob("*/checkpoint/step-00000008.1")):
        if time.monotonic() > limit:
            raise RuntimeError((out / "host0.txt").read_text())
        time.sleep(0.02)


def processes(host: Host) -> list[int]:
    """What runs on the host."""
    listed = subprocess.run(["ip", "netns", "pids", host.namespace], check=True, capture_output=True, text=True)
    return [int(pid) for pid in listed.stdout.split()]


def power_off(cluster: Sequence[Host], node: int) -> None:
    """Kill all that runs on the host."""
    cluster[node].end()


def cut(cluster: Sequence[Host], node: int) -> None:
    """The host's link carries nothing from now on."""
    switch = cluster[0].namespace.replace("host0", "switch")
    subprocess.run(["ip", "-n", switch, "link", "set", f"host{node}", "down"], check=True)


def stop_a_while(cluster: Sequence[Host], node: int) -> None:
    """Every process of the host stops, and goes on after the others have gone on without it."""
    pids = processes(cluster[node])
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    time.sleep(15.0)
    for pid in pids:
        os.kill(pid, signal.SIGCONT)


def nothing(cluster: Sequence[Host], node: int) -> None:
    """The fault is injected."""


Row = tuple[str, Callable[[Sequence[Host], int], None], int, tuple[str, ...]]
ROWS: list[Row] = [
    ("kill a worker of host 1", nothing, 1, ("--fault", "kill:rank=1,step=10")),
    ("lose the device of host 1", nothing, 1, ("--fault", "lost:rank=1,step=10")),
    *((f"power off host {node}", power_off, node, ()) for node in range(3)),
    *((f"cut the link of host {node}", cut, node, ()) for node in (0, 2)),
    *((f"stop host {node} for 15 s", stop_a_while, node, ()) for node in (0, 2)),
]


def measured(row: Row, whole: Path | None) -> tuple[dict[str, Any], Path]:
    """One run, disturbed as the row says."""
    name, disturb, node, words = row
    out = Path(tempfile.mkdtemp(prefix="lost-machines-"))
    with hosts(3, "1gbit") as cluster:
        started = launched(cluster, out, *words)
        saved(out)
        at = time.time()
        disturb(cluster, node)
        until = time.monotonic() + LIMIT
        codes = [process.wait(timeout=max(1.0, until - time.monotonic())) for process in started]
    (folder,) = (out / "runs").iterdir()
    run = names.read_run(folder)
    steps = [line["step"] for line in read_lines(folder / names.METRICS) if "loss" in line]
    facts: dict[str, Any] = {"row": name, "codes": codes, "attempts": len(run["sessions"]), "ranks": run["world"]}
    facts |= {"status": run["status"], "each_step_once": steps == list(range(1, STEPS + 1))}
    first, last = run["sessions"][0], run["sessions"][-1]
    if len(run["sessions"]) > 1:
        noticed = first.get("seconds_to_detect") if disturb is nothing else first["ended"] - at
        facts |= {"seconds_to_notice": noticed, "seconds_to_step": last.get("seconds_to_step")}
        facts |= {"steps_lost": last.get("steps_lost"), "reason": first.get("reason")}
    if whole is not None:
        one, other = (load_file(each / names.WEIGHTS) for each in (whole, folder))
        facts["difference"] = max(
            float((one[key] - other[key]).abs().max()) / max(1.0, float(one[key].abs().max())) for key in one
        )
    return facts, folder


def judged(facts: dict[str, Any], row: Row) -> bool:
    """Whether the claim holds."""
    same = facts["difference"] == 0.0 if facts["ranks"] == 3 else facts["difference"] < 1e-9
    gone = {power_off: -9, cut: 85, stop_a_while: 85}.get(row[1], 0)
    codes = [gone if node == row[2] and row[1] is not nothing else 0 for node in range(3)]
    return bool(facts["status"] == "finished" and facts["each_step_once"] and same and facts["codes"] == codes)


def main() -> None:
    """Measure the rows, and keep them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="rows with this in their name")
    only = parser.parse_args().only
    if reason := why_not():
        sys.exit(reason)
    whole = measured(("undisturbed", nothing, 0, ()), None)[1]
    rows = []
    for row in [row for row in ROWS if only is None or only in row[0]]:
        facts, folder = measured(row, whole)
        facts["held"] = judged(facts, row)
        rows.append(facts)
        print(facts, folder, flush=True)
    if only is None:
        keep("lost_machines", {"rows": rows, "held": sum(row["held"] for row in rows)})


if __name__ == "__main__":
    main()
