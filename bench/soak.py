"""Faults of any kind, at any time, on three hosts: what a run loses, and whether its numbers stay the same.

    python bench/soak.py --minutes 20 --every 20     as root, on Linux: hosts are network namespaces with shaped links

Faults come from outside, at moments of a Poisson process: a worker is killed, stopped for ever or for a second, a link
is cut for a second or slow for five, a bit of the newest checkpoint flips, a whole host dies and comes back after the
others went on without it. At the end the run is stopped, as a scheduler does.

Claim: every fault that ends an attempt is noticed, with its rank; every step is in the record once, with the loss and
the last parameters of a run that was never disturbed (float64: within 1e-9); no process, socket, shared memory or
temporary file is left over. Goodput is steps that count by their undisturbed seconds, of the wall time.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from keep import keep

sys.path.insert(0, str(Path(__file__).parents[1]))

from meshwise.records.checkpoints import MANIFEST, checkpoints_in
from meshwise.records.files import read_lines
from meshwise.recovery.loading import open_newest, whole
from tests.hosts import INTERFACE, Host, _kill_inside, hosts, why_not

JOB = Path(__file__).parents[1] / "tests" / "faults" / "job_that_lasts.py"
EXACT = ("--precision", "fp64", "--exact-random")
RATE, PORT, SAFE = "1gbit", 29500, 60.0
ENDS = {"kill": "killed", "stop": "hung", "host": "lost"}
"""Faults that end an attempt, and as what the record has them."""


class Run:
    """A run on three hosts that share a folder."""

    def __init__(self, cluster: list[Host], out: Path, pause: float) -> None:
        self.cluster, self.out = cluster, out
        self.variables = {
            "SOAK_PAUSE": str(pause),
            "GLOO_SOCKET_IFNAME": INTERFACE,
        }
        self.scratch = [out / f"tmp{node}" for node in range(len(cluster))]
        for folder in self.scratch:
            folder.mkdir(parents=True)
        self.launchers: list[subprocess.Popen[bytes]] = []
        self.pids: set[int] = set()
        self.starts, self.resumes = 0, False

    def start(self) -> None:
        """Start a launcher on each host, and wait for a step."""
        before, self.starts = self.steps(), self.starts + 1
        self.resumes = self.starts > 1
        self.launchers = [self.launched(node) for node in range(len(self.cluster))]
        until = time.monotonic() + SAFE
        while self.steps() <= before and time.monotonic() < until:
            time.sleep(0.2)

    def launched(self, node: int) -> subprocess.Popen[bytes]:
        """A launcher on this host, by the same command as before."""
        new = [f"{JOB}:job", "--out", str(self.out / "runs"), *EXACT, "--save-every", "2s"]
        words = ["--resume", str(self.folder)] if self.resumes else new
        words += ["--nnodes", str(len(self.cluster)), "--rdzv", f"{self.cluster[0].address}:{PORT + self.starts}"]
        words += ["--devices", "1xcpu", "--restarts", "1000", "--hang-limit", "4s", "--node-rank", str(node)]
        command = [sys.executable, "-m", "meshwise", "run", *words]
        variables = self.variables | {"TMPDIR": str(self.scratch[node])}
        with (self.out / f"host{node}.txt").open("ab") as log:
            return self.cluster[node].popen(command, variables, stdout=log, stderr=log)

    def gone(self) -> list[int]:
        """Hosts whose launcher has ended: by itself, as one that a fault of ours ended is started again."""
        return [node for node, launcher in enumerate(self.launchers) if launcher.poll() is not None]

    def said(self, node: int) -> str:
        """The last lines that the launchers of a host printed."""
        return "\n".join((self.out / f"host{node}.txt").read_text().splitlines()[-8:])

    @property
    def folder(self) -> Path:
        """The run's folder."""
        return next((self.out / "runs").iterdir())

    @property
    def record(self) -> dict[str, Any]:
        """Its run.json."""
        try:
            found: dict[str, Any] = json.loads((self.folder / "run.json").read_text())
        except (OSError, ValueError, StopIteration):
            return {}
        return found

    def steps(self) -> int:
        """The last step whose loss is written."""
        with suppress(StopIteration, OSError):
            return max(
                (line["step"] for line in read_lines(self.folder / "metrics.jsonl") if "loss" in line), default=0
            )
        return 0

    def worker(self, node: int) -> tuple[int, int] | None:
        """The rank and the process of the worker on a host, where one lives."""
        words = ["ip", "netns", "pids", self.cluster[node].namespace]
        here = {int(pid) for pid in subprocess.run(words, capture_output=True, text=True).stdout.split()}
        for path in self.folder.glob("spans/**/*.jsonl"):
            for line in read_lines(path):
                if line.get("pid") in here:
                    self.pids.add(line["pid"])
                    return line["rank"], line["pid"]
        return None

    def stop(self) -> list[int]:
        """As a scheduler does before the time is over; exit codes of the launchers that were left."""
        left = [launcher for launcher in self.launchers if launcher.poll() is None]
        for launcher in left:
            launcher.send_signal(signal.SIGUSR1)
        return [launcher.wait(timeout=SAFE + 60) for launcher in left]


def link(run: Run, node: int, *words: str) -> None:
    """Change the switch's end of a host's link."""
    switch = run.cluster[0].namespace.replace("host0", "switch")
    subprocess.run(["ip", "-n", switch, "link", "set", f"host{node}", *words], check=True)


def slow_link(run: Run, node: int, rate: str) -> None:
    """Change the rate of what a host sends."""
    where = ["tc", "-n", run.cluster[node].namespace, "qdisc", "change", "dev", INTERFACE, "root", "tbf"]
    subprocess.run([*where, "rate", rate, "burst", "64kb", "latency", "50ms"], check=True)


def signalled(run: Run, node: int, number: signal.Signals, after: float | None = None) -> bool:
    """Send a signal to the worker of a host, and SIGCONT after so many seconds. False where there is none now."""
    worker = run.worker(node)
    if worker is None:
        return False
    pid = worker[1]
    with suppress(ProcessLookupError):
        os.kill(pid, number)
        if after is not None:
            time.sleep(after)
            os.kill(pid, signal.SIGCONT)
        return True
    return False


def for_a_while(begin: Callable[[], None], seconds: float, end: Callable[[], None]) -> bool:
    """Something, and its end after so many seconds."""
    begin()
    time.sleep(seconds)
    end()
    return True


def rot(run: Run, node: int) -> bool:
    """A bit of the newest checkpoint flips."""
    found = checkpoints_in(run.folder / "checkpoint")[-1:]
    with suppress(OSError, IndexError):  # there is none, or it was removed meanwhile
        path = next(iter(found[0].path.glob(f"rank{node}.*")), found[0].path / MANIFEST)
        data = path.read_bytes()
        path.write_bytes(data[:-1] + bytes([data[-1] ^ 8]))
        return True
    return False


def host_dies(run: Run, node: int) -> bool:
    """All that runs on a host is gone; the others go on, and it comes back by the same command."""
    attempts = len(run.record.get("sessions", []))
    _kill_inside(run.cluster[node].namespace)
    shutil.rmtree(run.scratch[node])  # its own disk
    run.scratch[node].mkdir()
    wait_for(run, attempts + 1)
    run.launchers[node] = run.launched(node)
    wait_for(run, attempts + 2)
    return True


def wait_for(run: Run, attempts: int) -> None:
    """Until so many attempts have begun, or the patience is over."""
    until = time.monotonic() + SAFE
    while len(run.record.get("sessions", [])) < attempts and time.monotonic() < until:
        time.sleep(0.2)


FAULTS: dict[str, Callable[[Run, int], bool]] = {
    "kill": lambda run, node: signalled(run, node, signal.SIGKILL),
    "stop": lambda run, node: signalled(run, node, signal.SIGSTOP),
    "pause": lambda run, node: signalled(run, node, signal.SIGSTOP, after=1.0),
    "cut": lambda run, node: for_a_while(lambda: link(run, node, "down"), 1.0, lambda: link(run, node, "up")),
    "slow link": lambda run, node: for_a_while(
        lambda: slow_link(run, node, "2mbit"), 5.0, lambda: slow_link(run, node, RATE)
    ),
    "rot": rot,
    "host": host_dies,
}


def undisturbed_step(run: Run, seconds: float = 20.0) -> float:
    """Seconds of a step, measured before any fault."""
    first = run.steps()
    time.sleep(seconds)
    return seconds / (run.steps() - first)


def soaked(run: Run, minutes: float, every: float, draw: random.Random) -> list[dict[str, Any]]:
    """Let faults happen until the time is over; what happened when."""
    done, until = [], time.monotonic() + 60 * minutes
    while time.monotonic() < until:
        time.sleep(min(draw.expovariate(1 / every), max(0.0, until - time.monotonic())))
        if all(launcher.poll() is not None for launcher in run.launchers):
            codes = [launcher.returncode for launcher in run.launchers]
            done.append({"kind": "ended", "codes": codes, "time": time.time()})
            print(f"the run ended with {codes}: started again", flush=True)
            run.start()
        for node in run.gone():
            done.append({"kind": "left", "host": node, "code": run.launchers[node].returncode, "time": time.time()})
            print(f"the launcher of host {node} ended by itself:\n{run.said(node)}", flush=True)
            run.launchers[node] = run.launched(node)
        kind, node = draw.choice(list(FAULTS)), draw.randrange(len(run.cluster))
        began, attempt, worker = time.time(), len(run.record.get("sessions", [])), run.worker(node)
        if FAULTS[kind](run, node):
            done.append({"kind": kind, "host": node, "time": began, "attempt": attempt, "rank": worker and worker[0]})
            print(
                f"{time.monotonic() - until + 60 * minutes:6.0f} s  step {run.steps():5}  {kind} on host {node}",
                flush=True,
            )
    step, until = run.steps(), time.monotonic() + SAFE
    while run.steps() <= step and time.monotonic() < until:  # the last of them is answered
        time.sleep(0.2)
    return done


def noticed(faults: list[dict[str, Any]], sessions: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each fault that ends an attempt: whether its attempt's record has the kind and the rank, and after how long.

    Where two come in one attempt before it ends, the one that its record names counts."""
    found = []
    for fault in faults:
        if fault["kind"] not in ENDS or fault["attempt"] < 1:
            continue
        session = sessions[fault["attempt"] - 1]
        ends = session.get("ended") or 0
        if session["status"] != "stopped" and ends < fault["time"]:
            continue
        others = [f for f in faults if f["kind"] in ENDS and f["attempt"] == fault["attempt"] and f is not fault]
        if not _is_named(fault, session) and any(f["time"] < ends and _is_named(f, session) for f in others):
            continue
        right = _is_named(fault, session)
        found.append({**fault, "right": right, "seconds": ends - fault["time"], "seen": session.get("reason")})
    return found


def _is_named(fault: dict[str, Any], session: dict[str, Any]) -> bool:
    """Whether an attempt's record has the fault. One whose host had no worker is known by its kind alone."""
    return session.get("kind") == ENDS[fault["kind"]] and fault["rank"] in (session.get("rank"), None)


def differences(run: Run, alone: Path, step: int) -> dict[str, Any]:
    """What the run has beside one that was never disturbed: losses, and the parameters after the last step."""
    ours, theirs = (
        {line["step"]: line["loss"] for line in read_lines(folder / "metrics.jsonl") if line.get("step", 0) <= step}
        for folder in (run.folder, alone)
    )
    steps = [line["step"] for line in read_lines(run.folder / "metrics.jsonl") if "loss" in line]
    once = steps[:step] == list(range(1, step + 1)) and len(set(steps)) == len(steps)
    losses = max(abs(ours[at] - theirs[at]) / max(1.0, abs(theirs[at])) for at in ours)
    states = [
        whole(open_newest(folder / "checkpoint", only=f"step-{step:08d}.{n}").tree)
        for folder, n in ((run.folder, checkpoints_in(run.folder / "checkpoint")[-1].attempt), (alone, 1))
    ]
    models = [state["model"] for state in states]
    parameters = max(float((models[0][name].double() - models[1][name].double()).abs().max()) for name in models[0])
    return {"steps_once": once, "losses_apart": losses, "parameters_apart": parameters}


def undisturbed(out: Path, step: int) -> Path:
    """The folder of a run of three ranks on one machine that saves after this step."""
    words = [
        "--devices",
        "3xcpu",
        *EXACT,
        "--epochs",
        str(step // 20 + 1),
        "--save-every",
        str(step),
        "--log-every",
        "1000",
    ]
    command = [sys.executable, "-m", "meshwise", "run", f"{JOB}:job", *words, "--out", str(out)]
    subprocess.run(command, check=True, capture_output=True)
    return next(out.iterdir())


def left_over(run: Run) -> dict[str, Any]:
    """Processes and sockets of the hosts, shared memory and temporary files of the run."""
    time.sleep(2.0)
    found: dict[str, Any] = {}
    for host in run.cluster:
        pids = subprocess.run(["ip", "netns", "pids", host.namespace], capture_output=True, text=True).stdout.split()
        words = ["ip", "netns", "exec", host.namespace, "ss", "-Hxtan", "state", "connected", "state", "listening"]
        sockets = subprocess.run(words, capture_output=True, text=True).stdout.splitlines()
        found[host.address] = {"processes": len(pids), "sockets": len([s for s in sockets if "TIME-WAIT" not in s])}
    shared = [path.name for path in Path("/dev/shm").iterdir() if any(str(pid) in path.name for pid in run.pids)]
    files = [path.name for folder in run.scratch for path in folder.iterdir() if path.name[:6] != "torchi"]
    return {"hosts": found, "shared_memory": shared, "temporary": files}


def main() -> None:
    """Soak, judge, keep."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--every", type=float, default=20.0, help="mean seconds between two faults")
    parser.add_argument("--pause", type=float, default=0.1, help="seconds of a step")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    if reason := why_not():
        raise SystemExit(reason)
    with tempfile.TemporaryDirectory() as name, hosts(3, RATE) as cluster:
        run = Run(cluster, Path(name) / "soak", given.pause)
        run.start()
        alone, began = undisturbed_step(run), time.monotonic()
        begun = run.steps()
        faults = soaked(run, given.minutes, given.every, random.Random(given.seed))
        codes, wall = run.stop(), time.monotonic() - began
        left, step, sessions = (
            left_over(run),
            checkpoints_in(run.folder / "checkpoint")[-1].step,
            run.record["sessions"],
        )
        written = run.steps()
        apart = differences(run, undisturbed(Path(name) / "alone", step), step)
        texts = [(run.out / f"host{node}.txt").read_text() for node in range(3)]
    seen = noticed(faults, sessions)
    seconds = [one["seconds"] for one in seen if one["right"]]
    again = [session["seconds_to_step"] for session in sessions if "seconds_to_step" in session]
    result = {
        "claim": " ".join((__doc__ or "").partition("Claim: ")[2].split()),
        "given": vars(given),
        "wall_seconds": wall,
        "steps": step,
        "seconds_of_a_step": alone,
        "goodput": (step - begun) * alone / wall,
        "attempts": len(sessions),
        "steps_lost": sum(session.get("steps_lost", 0) for session in sessions),
        "faults": dict(Counter(fault["kind"] for fault in faults)),
        "ended_attempts": {"faults": len(seen), "named": sum(one["right"] for one in seen)},
        "not_named": [one for one in seen if not one["right"]],
        "seconds_to_detect": _middle(seconds),
        "seconds_to_step": _middle(again),
        "rotten_noticed": sum(text.count(" is not used: ") for text in texts),
        "exit_codes": codes,
        "steps_written": written,
        "left_over": left,
        **apart,
    }
    print(json.dumps({name: value for name, value in result.items() if name not in ("claim", "given")}, indent=1))
    if "Traceback" in "".join(texts):
        print("\n".join(texts)[-4000:])
    keep("soak", result)


def _middle(values: list[float]) -> dict[str, float]:
    if len(values) < 2:
        return dict.fromkeys(("p50", "p95"), values[0]) if values else {}
    return {"p50": median(values), "p95": quantiles(values, n=20)[-1]}


if __name__ == "__main__":
    main()
