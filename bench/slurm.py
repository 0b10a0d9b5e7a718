"""What a real Slurm does to a run that `meshwise submit` sent, and what becomes of the run.

    python bench/slurm.py                             every row, two clusters side by side, as root on Linux
    python bench/slurm.py --events usr1,stop --kinds job --launch node      these rows anew; the others stay

Each row is a cluster of three nodes of its own (tests/slurm.py), a run on two of them with two ranks each, and one
event while it trains. Claim: the run goes on exactly once without a hand, and never after `scancel` or `meshwise stop`;
its last parameters are bitwise those of a run that nothing happened to, where it had four ranks all the time, else
within 1e-9 (float64); a run that was warned repeats no step; run.json does not say "running" after the end. Through
4, 2 and 3 ranks (`sizes`: `--nodes 2-4`, one rank each, nodes drained and back) each step's loss too, and in a loop its
batch and learning rate. A row whose event did not happen has failed.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil
import torch
from keep import RESULTS, keep
from safetensors.torch import load_file

sys.path.insert(0, str(Path(__file__).parents[1]))

from meshwise.records import folder as names
from meshwise.records.attempts import attempts_of
from meshwise.records.checkpoints import checkpoints_in
from tests.slurm import slurm, why_not

JOBS = Path(__file__).with_name("slurm_jobs.py")
KINDS, LAUNCH = ("job", "loop"), ("node", "device")
EVENTS = (
    "usr1",
    "limit",
    "requeue",
    "killed",
    "cut",
    "cut_script",
    "preempted",
    "preempted_grace",
    "scancel",
    "stop",
    "sizes",
)
ENDS = ("scancel", "stop")
NO_WARNING = ("killed", "cut", "cut_script")
STEPS, SAVE_EVERY = 300, 20
PREEMPTION = "PreemptType=preempt/partition_prio\nPreemptMode=REQUEUE\nPartitionName=high Nodes=ALL PriorityTier=10\n"
RESULT = RESULTS / "slurm.json"  # rows that are not run again stay in it
LIMIT = 300.0  # seconds for what a row waits for


class Row:
    """One run, and what happens to it."""

    def __init__(self, kind: str, launch: str, event: str, folder: Path) -> None:
        self.kind, self.launch, self.event, self.here = kind, launch, event, folder
        self.facts: dict[str, Any] = {"kind": kind, "launch": launch, "event": event}
        self.wrong: list[str] = []

    def run(self) -> dict[str, Any]:
        more = PREEMPTION if self.event.startswith("preempted") else ""
        try:
            with slurm(4 if self.event == "sizes" else 3, more=more, kill_wait=10) as cluster:
                self.cluster = cluster
                self._send()
                _until(lambda: self.steps() >= 45, "it never trained")
                began = time.time()
                getattr(self, f"_{self.event}")()
                self._watch(began)
        except AssertionError as error:
            self.wrong.append(str(error)[:300])
        return self.facts | {"wrong": self.wrong}

    def _send(self) -> None:
        options = ["--nodes", "2-4" if self.event == "sizes" else "2", "--site", str(self.here / "site.toml")]
        options += ["--time", "1min"] if self.event == "limit" else ["--time", "20min"]
        devices = "1xcpu" if self.event == "sizes" else "2xcpu"
        command = f"{sys.executable} -m meshwise"
        text = f'devices = "{devices}"\ncommand = "{command}"\npartition = "main"\n'
        (self.here / "site.toml").write_text(text)
        own = [str(self.here / "own")] if self.kind == "loop" else []
        words = ["--save-every", str(SAVE_EVERY), str(JOBS) if own else f"{JOBS}:job", *own]
        script = self._typed("submit", *options, "--dry-run", *words)
        script = script[script.index("#!/bin/bash") :]
        if self.launch == "device":
            script = script.replace("--ntasks-per-node=1", "--ntasks-per-node=2").replace("--devices 2xcpu ", "")
        (self.here / "own").mkdir(exist_ok=True)
        (self.here / "submit.sh").write_text(script)
        line = next(line for line in script.splitlines() if line.startswith("run="))
        self.folder = Path(shlex.split(line.removeprefix("run="))[0].partition("${")[0])
        pause = {"BENCH_PAUSE": "0.3"} if self.event == "limit" else {}  # longer than the limit
        said = self.cluster.call("sbatch", "--parsable", "-o", "out-%j.txt", "submit.sh", folder=self.here, **pause)
        self.job = said.stdout.strip()
        sent = {"jobs": {self.job: time.time()}}
        names.write_run(_made(self.folder), {"job": "slurm-bench", "status": "queued", "submission": sent})

    def _typed(self, *words: str) -> str:
        done = self.cluster.call(sys.executable, "-m", "meshwise", *words, folder=self.here)
        assert done.returncode == 0, done.stdout
        return done.stdout

    def steps(self) -> int:
        """Steps done, as far as the disk tells: of a loop those of its newest state."""
        if self.kind == "job":
            path = self.folder / "metrics.jsonl"
            return path.read_text().count('"loss"') if path.exists() else 0
        saved = [each.step for each in checkpoints_in(self.here / "own" / "state")]
        return max(saved, default=0)

    # What happens.

    def _usr1(self) -> None:
        self.cluster.call("scancel", "--signal=USR1", self.job)

    def _limit(self) -> None:
        pass  # it comes by itself

    def _requeue(self) -> None:
        self.cluster.call("scontrol", "requeue", self.job)

    def _killed(self) -> None:
        for process in self._on_node(self._nodes()[-1]):
            process.kill()

    def _cut(self) -> None:
        self._link(self._nodes()[-1], "down")

    def _cut_script(self) -> None:
        """The node on which the batch script runs; its link comes back later, when the run is on other nodes."""
        self._link(self._nodes()[0], "down")
        _until(lambda: self._restarts() >= 1 and self.cluster.facts(self.job)["JobState"] == "RUNNING", "not requeued")
        time.sleep(10)
        self._link(self._cut_node, "up")

    def _preempted(self) -> None:
        words = ["-p", "high", "-N3", "--exclusive", "-o", "high.txt", "--wrap", "sleep 5"]
        done = self.cluster.call("sbatch", "--parsable", *words, folder=self.here)
        self.facts["by"] = done.stdout.strip()

    def _preempted_grace(self) -> None:
        self.cluster.call("scontrol", "update", "PartitionName=main", "GraceTime=15")
        self._preempted()

    def _scancel(self) -> None:
        self.cluster.call("scancel", self.job)

    def _stop(self) -> None:
        self._typed("stop", "--in", str(self.folder.parent), self.folder.name)

    def _sizes(self) -> None:
        """Four nodes, then two, then three: what the queue has as it starts again."""
        for nodes, at in ((2, 0), (3, 120)):
            _until(lambda at=at: self.steps() >= at, "no step came again")
            state = [("n[3-4]", "DRAIN", "Reason=bench")] if nodes == 2 else [("n3", "RESUME")]
            for name, *words in state:
                self.cluster.call("scontrol", "update", f"NodeName={name}", f"State={words[0]}", *words[1:])
            before = self._restarts()
            self.cluster.call("scancel", "--signal=USR1", self.job)
            _until(lambda before=before: self._restarts() > before and self._trains(), "it was not started again")

    def _trains(self) -> bool:
        facts = names.read_run(self.folder)
        return facts["status"] == "running" and len(facts["sessions"]) == self._restarts() + 1

    def _link(self, node: str, state: str) -> None:
        self._cut_node = node
        self.cluster.call("ip", "link", "set", f"v{node.removeprefix('n')}", state)

    def _nodes(self) -> list[str]:
        listed = self.cluster.facts(self.job)["NodeList"]
        return self.cluster.call("scontrol", "show", "hostnames", listed).stdout.split()

    def _on_node(self, node: str) -> list[psutil.Process]:
        found = []
        for process in psutil.Process(self.cluster.process).children(recursive=True):
            done = subprocess.run(["nsenter", "-t", str(process.pid), "-u", "hostname"], capture_output=True, text=True)
            if done.stdout.strip() == node:
                found.append(process)
        return found

    # What becomes of it.

    def _restarts(self) -> int:
        return int(self.cluster.facts(self.job).get("Restarts", "0"))

    def _watch(self, began: float) -> None:
        if self.event in ENDS:
            _until(lambda: self.cluster.facts(self.job)["JobState"] not in ("RUNNING", "COMPLETING"), "it did not end")
            time.sleep(20)  # longer than Slurm needs to start a requeued job
            self._claim(self._restarts() == 0, f"started again {self._restarts()} times after {self.event}")
            self._claim(self.cluster.facts(self.job)["JobState"] != "PENDING", "it is queued again")
            self._claim(self._saved(), "no state was saved")
        else:
            _until(lambda: self._restarts() >= 1 or self._over(), "Slurm did not requeue it", 120.0)
            requeued, before = time.time(), self.steps()
            _until(lambda: self.steps() > before or self._over(), "no step came again")
            self.facts |= {"seconds_to_requeue": requeued - began, "seconds_to_step": time.time() - began}
            _until(self._over, "it did not come to its end")
            again = self._restarts()
            expected = {"limit": range(1, 9), "sizes": (2,)}.get(self.event, (1,))
            self._claim(again in expected, f"started again {again} times")
            self._claim(
                self.cluster.facts(self.job)["JobState"] == "COMPLETED",
                f"ended {self.cluster.facts(self.job)['JobState']}",
            )
            self._compare()
        self._records()

    def _over(self) -> bool:
        return self.cluster.facts(self.job)["JobState"] in ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")

    def _saved(self) -> bool:
        return (self.folder / "checkpoint").exists() or (self.here / "own" / "state").exists()

    def _compare(self) -> None:
        path = self.folder / "weights.safetensors" if self.kind == "job" else self.here / "own" / "last.pt"
        if not path.exists():
            return self._claim(False, "no last parameters")
        after = load_file(path) if path.suffix == ".safetensors" else torch.load(path)
        whole = UNDISTURBED[self.kind]
        apart = max(
            float((after[name] - value).abs().max()) for name, value in whole.items() if value.is_floating_point()
        )
        sizes = {one.devices for one in attempts_of(names.read_run(self.folder))} - {None}
        self.facts |= {"apart": apart, "sizes": sorted(sizes)}
        self._claim(apart == 0 if sizes <= {4} else apart < 1e-9, f"last parameters differ by {apart:.2g}")
        if self.event == "sizes":
            found = [one.devices for one in attempts_of(names.read_run(self.folder))]
            self._claim(found == [4, 2, 3], f"its attempts had {found} ranks")
            self._compare_steps(
                STEPS_OF[self.kind], _steps_in(self.folder if self.kind == "job" else self.here / "own")
            )

    def _compare_steps(self, whole: list[dict[str, float]], after: list[dict[str, float]]) -> None:
        """Losses, and of a loop batches and learning rates too, step by step."""
        self._claim(len(whole) == len(after) == STEPS, f"{len(after)} steps, and {len(whole)} undisturbed")
        for name in whole[0]:
            apart = max(abs(a[name] - b[name]) for a, b in zip(whole, after, strict=False))
            self.facts[f"{name}_apart"] = apart
            self._claim(apart < 1e-9, f"{name} differs by {apart:.2g}")

    def _records(self) -> None:
        facts = names.read_run(self.folder)
        self.facts["attempts"] = [f"{one.status}: {one.reason}"[:120] for one in attempts_of(facts)]
        self._claim(facts["status"] != "running", "run.json says running")
        if self.kind == "job":
            lines = [json.loads(line) for line in (self.folder / "metrics.jsonl").read_text().splitlines()]
            steps = [line["step"] for line in lines if "loss" in line]
            done = list(range(1, len(steps) + 1))
            self._claim(steps == done and (self.event in ENDS or len(steps) == STEPS), "steps are missing or twice")
            lost = sum(one.steps_lost or 0 for one in attempts_of(facts))
            self.facts["steps_again"] = lost
            self._claim(lost <= (SAVE_EVERY if self.event in NO_WARNING else 0), f"{lost} steps were done again")

    def _claim(self, holds: bool, otherwise: str) -> None:
        if not holds:
            self.wrong.append(otherwise)


UNDISTURBED: dict[str, dict[str, torch.Tensor]] = {}
STEPS_OF: dict[str, list[dict[str, float]]] = {}
"""Of the undisturbed runs."""


def _steps_in(folder: Path) -> list[dict[str, float]]:
    """What is known of each step, in their order."""
    path = next(path for name in ("steps.jsonl", "metrics.jsonl") if (path := folder / name).exists())
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [
        {name: line[name] for name in ("loss", "batch", "rate") if name in line} for line in lines if "loss" in line
    ]


def undisturbed(kind: str, folder: Path) -> dict[str, torch.Tensor]:
    """The last parameters of a run on four ranks to which nothing happens."""
    words = [f"{JOBS}:job", "--out", str(folder)] if kind == "job" else ["--out", str(folder), str(JOBS), str(folder)]
    command = [sys.executable, "-m", "meshwise", "run", "--devices", "4xcpu", *words]
    subprocess.run(command, check=True, capture_output=True, env=os.environ | {"BENCH_PAUSE": "0"})
    if kind == "loop":
        STEPS_OF[kind] = _steps_in(folder)
        return torch.load(folder / "last.pt")
    weights = next(folder.glob("*/weights.safetensors"))
    STEPS_OF[kind] = _steps_in(weights.parent)
    return load_file(weights)


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _until(true: Callable[[], Any], otherwise: str, seconds: float = LIMIT) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, f"{otherwise} in {seconds:.0f} s"
        time.sleep(0.2)


def main() -> None:
    """Run the rows, and keep them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--events", default=",".join(EVENTS))
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--launch", default=",".join(LAUNCH))
    parser.add_argument("--clusters", type=int, default=2, help="side by side")
    parser.add_argument("--minutes", type=float, default=90.0, help="no row begins later than this")
    given = parser.parse_args()
    if why_not() is not None:
        sys.exit(why_not())
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    began = time.monotonic()
    rows = [*itertools.product(given.events.split(","), given.kinds.split(","), given.launch.split(","))]
    rows = [row for row in rows if row[0] != "sizes" or row[2] == "node"]  # there a node is one device: both are one
    done: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="slurm-bench-", ignore_cleanup_errors=True) as made:
        for kind in given.kinds.split(","):
            UNDISTURBED[kind] = undisturbed(kind, _made(Path(made) / kind))

        def one(number: int) -> None:
            event, kind, launch = rows[number]
            if time.monotonic() - began > 60 * given.minutes:
                return
            row = Row(kind, launch, event, _made(Path(made) / f"row{number}")).run()
            done.append(row)
            print(f"{event:<16}{kind:<6}{launch:<8}{_row_text(row)}", flush=True)

        with ThreadPoolExecutor(given.clusters) as pool:
            list(pool.map(one, range(len(rows))))
    good = sum(not row["wrong"] for row in done)
    print(f"{good} of {len(done)} rows hold; {len(rows) - len(done)} were not begun")
    known = {_key(row): row for row in json.loads(RESULT.read_text())["rows"]} if RESULT.exists() else {}
    known |= {_key(row): row | {"date": datetime.now(UTC).date().isoformat()} for row in done}
    keep("slurm", {"rows": [known[key] for key in sorted(known)]})
    sys.exit(good != len(rows))


def _key(row: dict[str, Any]) -> tuple[str, str, str]:
    return row["event"], row["kind"], row["launch"]


def _row_text(row: dict[str, Any]) -> str:
    figures = {name: f"{row[name]:.1f} s" for name in ("seconds_to_requeue", "seconds_to_step") if name in row}
    if "steps_again" in row:
        figures["steps_again"] = str(row["steps_again"])
    told = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in figures.items())
    return f"{told}  {'; '.join(row['wrong']) or 'holds'}"


if __name__ == "__main__":
    main()
