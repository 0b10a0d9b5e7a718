"""Ray Train on three nodes, in network namespaces: what a lost worker or node costs, with our heartbeats and without.

    python bench/engines.py                     each case once with each, in turn; goes on where the last time ended
    python bench/engines.py --tries 3 --only frozen --anew
    python bench/engines.py --slurm             a Slurm that notices a lost node after 300 s, in results/slurm.json

Needs root, `ip`, `tc`, and ray[train] in the Python that runs it. The same loop (tests/programs/ray_loop.py), saved and
reported every six steps, runs as "ours", with Ray's own time-outs, and as "alone": without heartbeats, and with a gloo
time-out of 10 s. Two workers and a spare node; to be resized, two or three workers on three nodes, of which one goes
and comes again. Seconds are from the fault to the first step that another attempt logs.

Claim: training goes on after each, with losses within 1e-9 of one device in float64, and what is repeated is said; a
frozen node is named within 10 s, and training goes on no later than Ray alone; after a killed worker, no slower. On
Slurm, a range of nodes goes on without a lost one by a second srun within 60 s, and no step is lost or done twice.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from keep import keep, kept

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.hosts import INTERFACE, Host, hosts, why_not
from tests.programs.ray_loop import EPOCH, loop, steps_of

ROOT = Path(__file__).parents[1]
CASES = ("worker killed", "node killed", "node frozen", "resized 3-2-3")
SIDES = ("ours", "alone")
EPOCHS, PAUSE = 400, 0.2
LIMIT = 240.0  # seconds of waiting for one thing
PORT = 6379
SAID = {"named": "silent for", "noticed": "[FailurePolicy]", "begun again": "Attempting to start training"}
TIMEOUT = 10  # seconds, of gloo, in Ray alone
VARIABLES = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AUTH_MODE": "disabled",  # inside namespaces that nothing else reaches
    "RAY_DEDUP_LOGS": "0",
    "RAY_memory_monitor_refresh_ms": "0",
    "GLOO_SOCKET_IFNAME": INTERFACE,
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}",
}


def drive(address: str, folder: str, case: str, side: str) -> None:
    """What runs on the head: Ray's trainer."""
    import ray
    from ray import train
    from ray.train.torch import TorchConfig, TorchTrainer

    ray.init(address=f"{address}:{PORT}", _node_ip_address=address)
    off = {"MESHWISE_SILENCE": "0"} if side == "alone" else {}
    size: dict[str, Any] = {"num_workers": 2}
    if "resized" in case:
        size = {"num_workers": (2, 3), "elastic_resize_monitor_interval_s": 5.0}
    TorchTrainer(
        loop,
        train_loop_config={"log": f"{folder}/log", "epochs": EPOCHS, "every": EPOCH, "pause": PAUSE},
        torch_config=TorchConfig(backend="gloo", **({"timeout_s": TIMEOUT} if off else {})),
        scaling_config=train.ScalingConfig(**size, placement_strategy="SPREAD"),
        run_config=train.RunConfig(
            name="run",
            storage_path=folder,
            failure_config=train.FailureConfig(max_failures=5),
            worker_runtime_env={"env_vars": off},
        ),
    ).fit()


def start_ray(host: Host, *words: str) -> subprocess.Popen[Any]:
    """A raylet on a host, which stays in the foreground."""
    ray = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--node-ip-address", host.address]
    memory = ["--object-store-memory", "80000000"]
    return host.popen([*ray, *memory, *words], VARIABLES, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def joins(host: Host, head: Host, folder: str) -> None:
    """Start a node with one CPU, and wait until it listens: nodes that start at once take each other's sockets."""
    before = sockets(folder)
    start_ray(host, "--address", f"{head.address}:{PORT}", "--num-cpus", "1")
    awaited(lambda: sockets(folder) > before)


def sockets(folder: str) -> int:
    """How many raylets of a try have listened."""
    return len(list(Path(folder, "ray", "session_latest", "sockets").glob("raylet*")))


def has_raylet(host: Host) -> bool:
    """Return whether Ray runs on a host."""
    return any("raylet/raylet" in words for words in processes(host).values())


def processes(host: Host) -> dict[int, str]:
    """The processes of a host, and their command lines."""
    pids = subprocess.run(["ip", "netns", "pids", host.namespace], capture_output=True, text=True).stdout.split()
    found = {}
    for pid in pids:
        with contextlib.suppress(OSError):
            found[int(pid)] = Path(f"/proc/{pid}/cmdline").read_text()
    return found


def workers(host: Host) -> list[int]:
    """The workers of Ray Train on a host."""
    return [pid for pid, words in processes(host).items() if "RayTrainWorker" in words]


def awaited(what: Callable[[], Any]) -> Any:
    """Wait until this is true, and return it."""
    until = time.monotonic() + LIMIT
    while time.monotonic() < until:
        if found := what():
            return found
        time.sleep(0.1)
    raise TimeoutError


def lose(case: str, host: Host) -> float:
    """Kill the worker or all processes of a host, or stop them. Return when."""
    number, at = signal.SIGSTOP if "frozen" in case else signal.SIGKILL, time.time()
    for pid in workers(host) if "worker" in case else processes(host):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
    return at


def listen(stream: Iterable[str], lines: list[tuple[float, str]], show: bool) -> None:
    """Note what Ray prints, and when."""
    for line in stream:
        lines.append((time.time(), line))
        if show:
            print(f"{time.time():.1f} {line}", end="", flush=True)


def tried(case: str, side: str, one: list[float], show: bool) -> dict[str, Any]:
    """One fault, and what came of it. Raises TimeoutError if Ray does not come up."""
    lines: list[tuple[float, str]] = []
    with tempfile.TemporaryDirectory() as folder, hosts(4, None) as (head, *nodes):
        words = ["--head", "--port", str(PORT), "--num-cpus", "0", "--include-dashboard", "false"]
        start_ray(head, *words, "--temp-dir", f"{folder}/ray")
        awaited(lambda: sockets(folder))
        for host in nodes:
            joins(host, head, folder)
        words = [sys.executable, __file__, "--drive", head.address, folder, case, side]
        driver = head.popen(words, VARIABLES, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        assert driver.stdout is not None
        threading.Thread(target=listen, args=(driver.stdout, lines, show), daemon=True).start()
        log, found = Path(folder) / "log", {"case": case, "side": side}

        def goes_on(size: int, after: float) -> float:
            """When two epochs have begun after this time, in other processes than before: the first of their steps."""
            before = {pid for at, *_, pid in steps_of(log) if at < after}
            new = lambda: [at for at, _, _, s, pid in steps_of(log) if s == size and pid not in before]  # noqa: E731
            return float(awaited(lambda: len(new()) > 2 * EPOCH and new())[0])

        size = 3 if "resized" in case else 2
        goes_on(size, 0.0)
        first = steps_of(log)[-1][4]
        victim = next(host for host in nodes if workers(host) and first not in workers(host))
        gone = "node" in case and any("TrainController" in words for words in processes(victim).values())
        if gone or not all(map(has_raylet, nodes)):
            raise TimeoutError  # Ray goes on without its own controller or a spare node with nobody
        at = lose(case, victim)
        if show:
            print(f"the fault: {time.time():.1f}")
        try:
            found["seconds"] = round(goes_on(2, at) - at, 1)
            if size == 3:
                came = time.time()
                joins(victim, head, folder)
                found["seconds to grow"] = round(goes_on(3, came) - came, 1)
            for name, text in SAID.items():
                when = next((stamp for stamp, line in lines if stamp > at and text in line), None)
                found[f"seconds until {name}"] = None if when is None else round(when - at, 1)
        except TimeoutError:
            found["seconds"] = None
            print("".join(line for _, line in lines[-60:]))
        said = [int(n) for _, line in lines for n in re.findall(r"resumes from step (\d+)", line)]
        return found | numbers(steps_of(log), said, one)


def numbers(steps: list[tuple[float, int, float, int, int]], said: list[int], one: list[float]) -> dict[str, Any]:
    """How far the losses are from one device's, and whether each attempt began where it said, without a gap."""
    starts = [new[1] for old, new in pairwise(steps) if new[4] != old[4]]
    orderly = all(new[1] == old[1] + 1 for old, new in pairwise(steps) if new[4] == old[4])
    gaps = any(new[1] > old[1] + 1 for old, new in pairwise(steps))
    return {
        "difference": max((abs(loss - one[step]) for _, step, loss, _, _ in steps), default=1.0),
        "repeated": len(steps) - len({step for _, step, *_ in steps}),
        "said": orderly and not gaps and all(step in (0, *said) for step in starts),
    }


def on_one_device() -> list[float]:
    """The losses that every attempt must have."""
    with tempfile.TemporaryDirectory() as folder:
        script = ROOT / "tests" / "programs" / "ray_loop.py"
        command = [sys.executable, str(script), f"{folder}/log"]
        subprocess.run(command, check=True, env=os.environ | VARIABLES | {"RAY_LOOP_EPOCHS": str(EPOCHS)})
        return [loss for _, _, loss, _, _ in steps_of(Path(folder) / "log")]


def summary(tries: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians of each case and side, and whether the claim holds."""
    rows: dict[str, dict[str, Any]] = {}
    for case in CASES:
        for side in SIDES:
            own = [each for each in tries if (each["case"], each["side"]) == (case, side)]
            names = dict.fromkeys(name for each in own for name in each if name.startswith("seconds"))
            known = {name: [each[name] for each in own if each.get(name) is not None] for name in names}
            medians = {name: round(median(values), 1) if values else None for name, values in known.items()}
            rows.setdefault(case, {})[side] = {"tries": len(own), **medians}
    right = all(each["seconds"] and each["difference"] < 1e-9 and each["said"] for each in tries)
    frozen = rows["node frozen"]["ours"].get("seconds until named")
    sooner = {}
    for case in CASES[:3]:
        ours, alone = ([t["seconds"] for t in tries if (t["case"], t["side"]) == (case, side)] for side in SIDES)
        known = [a - b for a, b in zip(ours, alone, strict=False) if a and b]
        sooner[case] = round(median(known), 1) if known else None
    return {
        "claim": " ".join((__doc__ or "").partition("Claim: ")[2].split()),
        "numbers held": right,
        "largest difference": max((each["difference"] for each in tries), default=None),
        "frozen node named within 10 s": None if frozen is None else frozen <= 10,
        "seconds more than Ray alone": sooner,
        "cases": rows,
        "tries": tries,
    }


def on_slurm() -> None:
    """Lose a node of three while `meshwise submit --nodes 2-3` trains there. Keep the times beside those of another
    Slurm (MESHWISE_SLURM_ROOT: tests/slurm.py)."""
    from tests.launcher.engines.test_submit_slurm import STEPS, lose_a_node, prepare
    from tests.launcher.engines.test_submit_slurm import steps_of as steps_in
    from tests.slurm import slurm

    rows = (kept("slurm") or {"rows": {}})["rows"]
    for lost in ("killed", "cut off"):
        with tempfile.TemporaryDirectory() as name, slurm(3, timeout=300) as cluster:
            version = cluster.call("sinfo", "--version").stdout.split()[-1]
            prepare(Path(name))
            run, _, seconds = lose_a_node(cluster, Path(name), lost)
            whole = steps_in(run) == list(range(1, STEPS + 1))
        rows.setdefault(version, {})[lost] = {**seconds, "whole": whole}
        print(version, lost, rows[version][lost])
    held = all(row["whole"] and row["second srun"] < 60 for found in rows.values() for row in found.values())
    keep("slurm", {"held": held, "rows": rows})


def main() -> None:
    """Try what was not tried, keep after each, print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--drive", nargs=4, help=argparse.SUPPRESS)
    parser.add_argument("--tries", type=int, default=1, help="of each case, with each")
    parser.add_argument("--only", default="", help="cases with this in their name")
    parser.add_argument("--show", action="store_true", help="what Ray prints, with the time")
    parser.add_argument("--anew", action="store_true", help="forget what was measured before")
    parser.add_argument("--slurm", action="store_true", help="lose a node of a Slurm instead")
    given = parser.parse_args()
    if given.slurm:
        on_slurm()
        return
    if given.drive:
        drive(*given.drive)
        return
    if (why := why_not()) is not None:
        sys.exit(why)
    import ray

    whole = {"tries": []} if given.anew else kept("engines") or {"tries": []}
    one = on_one_device()
    for number in range(given.tries):
        for case in [case for case in CASES if given.only in case]:
            for side in SIDES:
                if sum((each["case"], each["side"]) == (case, side) for each in whole["tries"]) > number:
                    continue
                try:
                    whole["tries"].append(tried(case, side, one, given.show))
                except TimeoutError:
                    print(f"{case}, {side}: Ray did not come up on all nodes. Start this again.")
                    continue
                print(json.dumps(whole["tries"][-1]), flush=True)
                keep("engines", {"ray": ray.__version__, **summary(whole["tries"])}, whole)


if __name__ == "__main__":
    main()
