"""What a fault costs a run: rehearsed with `--fault`, and judged by the numbers of the run that was never disturbed.

    python bench/faults.py --minutes 25        what fits; goes on where the last time ended
    python bench/faults.py --tries 3           every row of every plan three times, in turn
    python bench/faults.py --only kill --plans data=2 --anew

Rows come in an order in which each meets every technique once, and every number of ranks, before any comes twice; the
rank that fails changes from row to row.

Some are done from outside (`outside.py`), once step 8 is saved: to the process that forks the ranks, to loader workers,
to every process at once, to the run folder.

Claim: each fault of a machine happens, is noticed within 1 s (a hang at its limit, here 4 s), named with its rank, kind
and step, and answered by the run itself; its last parameters and its losses are bitwise those of the undisturbed run
under the same plan, and no process, shared memory or temporary file is left over. What programs do ends them within 5 s
with exit code 1. A run that was stopped from outside and is resumed has these numbers too; one whose folder is gone
says so, trains on and makes no other; children with sessions of their own are said. A row whose fault did not happen
has failed.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from keep import keep, kept
from outside import MARK, act, processes_of

TESTS = Path(__file__).parents[1] / "tests" / "faults"
ENDS = ("raises", "is_killed", "exits", "exits_at_once", "leaves_others", "out_of_memory", "not_a_number")
LIMIT = 300.0  # seconds of a run
CACHE = "torchinductor_"  # of torch, kept from process to process
GRACE = 2.0  # seconds after a run in which its last processes may end
PHASES = ("data", "forward", "backward", "communication", "optimizer", "evaluate", "checkpoint")
HANGS = ("--hang-limit=4s",)
HOLD = "slow 250ms:rank=0,step=9"  # the run lasts long enough for what is done from outside
ANY = -1


@dataclass(frozen=True)
class Case:
    """A plan and its devices. job: with batch norm and dropout (`state`), or of blocks with dropout."""

    technique: str
    ranks: int
    settings: str
    job: str = "state"

    def words(self) -> list[str]:
        """The options of its run. Steps 4, 8, 12, 16 are saved, each fifth is evaluated."""
        settings = [word for setting in self.settings.split() for word in ("--set", setting)]
        return ["--devices", f"{self.ranks}xcpu", *settings, "--save-every", "4", "--restarts", "3"]


CASES = (
    *(Case("data", n, f"data={n}") for n in (2, 3, 4)),
    *(Case("shard", n, f"shard={n}") for n in (2, 3, 4)),
    *(Case("zero1", n, f"data={n} zero1=true") for n in (2, 3)),
    Case("data × shard", 4, "data=2 shard=2"),
    *(Case("accumulate", n, f"data={n} accumulate=2") for n in (2, 3)),
    Case("tensor", 2, "tensor=2", "blocks"),
    Case("tensor", 4, "data=2 tensor=2", "blocks"),
    *(Case("pipeline", n, f"pipeline={n} accumulate=4", "blocks") for n in (2, 3)),
    Case("pipeline", 4, "data=2 pipeline=2 accumulate=2", "blocks"),
)


@dataclass(frozen=True)
class Row:
    """A scenario. faults: R is the rank that fails, O another one, A each. kind: as the record names the failure;
    "" where nobody fails. says: what is printed, … between its parts. replicas: least number of them that notice it.
    step: ANY where it is not told. outside: what is done from there. job: another one, of job_from_outside.py. resumed:
    stopped, it goes on with --resume, and ends with 0. techniques: where it can be, all by default."""

    name: str
    faults: Sequence[str]
    kind: str = "killed"
    code: int = 0
    options: Sequence[str] = ()
    says: str = ""
    attempts: int = 2
    replicas: int = 1
    any_rank: bool = False
    step: int = 15
    numbers: bool = True
    outside: str = ""
    job: str = ""
    resumed: bool = False
    techniques: Sequence[str] = ()


BOTH = ("kill:rank=R,step=15", "kill:rank=O,step=15")
NO_STATE = ("--save-every=1000",)
GONE = "removed or moved. The run continues … epoch 2/2, step 20 … : the run folder was removed or moved."
SERVER = "which starts the ranks"
OWN_LOOPS = ("data", "shard", "zero1", "data × shard", "tensor")  # the plans of scripts
ROWS = (
    *(Row(f"kill in {p}", [f"kill:rank=R,step={15 - 3 * (p == 'checkpoint')},phase={p}"], step=0) for p in PHASES),
    Row("kill in step 1", ["kill:rank=R,step=1"], step=1),
    Row("kill twice", ["kill:rank=R,step=7", "kill:rank=O,step=10,attempt=2"], attempts=3, step=7),
    Row("kill two at once", BOTH, any_rank=True),
    Row("exit", ["exit:rank=R,step=15"], "left"),
    Row("raise, not again", ["raise:rank=R,step=15"], "raised", 1, attempts=1, numbers=False),
    Row("hang", ["hang:rank=R,step=15"], "hung", options=HANGS),
    Row("stop", ["stop:rank=R,step=15,phase=backward"], "hung", options=HANGS),
    Row("slow", ["slow 30ms:rank=R,step=3"], "", says="rank R", attempts=1, step=0),
    Row("nan", ["nan:rank=R,step=15"], "raised", 1, attempts=1, any_rank=True, numbers=False, step=0),
    Row("bitflip", ["bitflip:rank=R,step=14"], "corrupt", replicas=3, step=16),  # replicas are compared at step 16
    Row("server stopped", [], "", attempts=1, outside="stop server"),
    Row("server stopped, kill", ["kill:rank=R,step=15"], outside="stop server"),
    Row("server stopped, SIGTERM", [], "", 143, (), "by SIGTERM", 1, outside="stop server, end run", resumed=True),
    Row("server killed", [], "server", says=SERVER, any_rank=True, step=ANY, outside="kill server"),
    Row("Ctrl-C to all", [], "", 130, (), "by Ctrl-C after step", 1, outside="interrupt all", resumed=True),
    Row("loader killed", [], "loader", says="loader worker", step=ANY, outside="kill loader", job="loader"),
    Row(
        "loader killed, no state",
        [],
        "loader",
        options=NO_STATE,
        says="need less memory",
        step=ANY,
        outside="kill first loader",
        job="loader",
    ),
    Row(
        "loader killed, script",
        [],
        "loader",
        1,
        says="need less memory",
        attempts=1,
        step=ANY,
        numbers=False,
        outside="kill loader",
        job="script",
        techniques=OWN_LOOPS,
    ),
    Row(
        "loader raises",
        [],
        "raised",
        1,
        says="record 77 is damaged:\nno such class",
        attempts=1,
        any_rank=True,
        step=ANY,
        numbers=False,
        job="damaged",
    ),
    Row("hang in evaluate", ["hang:rank=R,step=15,phase=evaluate"], "hung", options=HANGS),
    Row("folder removed", [], "", 1, says=GONE, attempts=0, numbers=False, outside="remove folder"),
    Row("folder moved", [], "", 1, says=GONE, attempts=0, numbers=False, outside="move folder"),
    Row("child left", [], "", says="still run: CHILD (sleep)", attempts=1, job="child"),
    Row("child left, kill", ["kill:rank=R,step=15"], says="still run: CHILD (sleep)", job="child"),
)


def applies(row: Row, case: Case) -> bool:
    """Whether a run under this plan can notice the fault: values that no replica holds too are nobody's to compare."""
    replicas = case.ranks if case.technique in ("data", "accumulate") else 1
    return replicas >= row.replicas and case.technique in (row.techniques or [case.technique])


def run(out: Path, *words: str, outside: str = "", rank: int = 0) -> dict[str, Any]:
    """One run: its exit code, its folder, what it printed, what is left over and what was done from outside, to this
    rank. As root it has a /dev/shm of its own."""
    mark, places = uuid.uuid4().hex, {name: out / name for name in ("tmp", "shared")}
    places["tmp"].mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "meshwise", "run", *words]
    if os.geteuid() == 0 and shutil.which("unshare"):
        script = 'mount -t tmpfs none /dev/shm; "$@"; code=$?; ls -A /dev/shm > "$SHARED"; exit $code'
        command = ["unshare", "-m", "sh", "-c", script, "--", *command]
    facts = {
        MARK: mark,
        "FAULT_STAMP": str(out / "stamp"),
        "TMPDIR": str(places["tmp"]),
        "SHARED": str(places["shared"]),
    }
    environment = os.environ | facts | {"FAULT_OUT": str(out), "FAULT_RANK": str(rank)}
    done: list[str] = []
    if outside:
        threading.Thread(target=act, args=(outside, out, mark, done), daemon=True).start()
    try:
        ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LIMIT)
        code, text = ended.returncode, ended.stdout + ended.stderr
    except subprocess.TimeoutExpired as error:
        code, text = -1, f"{(error.stdout or b'').decode()[-1000:]}\nnot over after {LIMIT:.0f} s"
    end = time.time()
    left = left_over(mark) + [path.name for path in places["tmp"].iterdir() if not path.name.startswith(CACHE)]
    left += places["shared"].read_text().split() if places["shared"].exists() else []
    folder = next((path.parent for path in out.glob("runs/*/run.json")), out)
    return {"code": code, "folder": folder, "text": text, "end": end, "left_over": left, "done": done}


def left_over(mark: str) -> list[str]:
    """Processes of the run that still live a moment after it; they are ended."""
    until = time.monotonic() + GRACE
    while found := processes_of(mark):
        if time.monotonic() > until:
            break
        time.sleep(0.05)
    names = [f"process {process.pid} {process.status()}" for process in found]
    for process in found:
        process.kill()
    return names


def numbers(folder: Path) -> str:
    """A digest of the last parameters and of each step's loss."""
    weights, metrics = folder / "weights.safetensors", folder / "metrics.jsonl"
    if not weights.exists():
        return "none"
    return hashlib.sha256(weights.read_bytes() + metrics.read_bytes()).hexdigest()


def job_of(case: Case, other: str = "") -> str:
    """What runs; other: of job_from_outside.py."""
    if other == "script":
        return str(TESTS / "job_from_outside.py")
    name = "job" if case.job == "state" else "blocks"
    return f"{TESTS / 'job_from_outside.py'}:{name}_{other}" if other else f"{TESTS / 'job_with_state.py'}:{name}"


def numbers_without(case: Case, other: str) -> str:
    """The numbers of a run to which nothing is done."""
    with tempfile.TemporaryDirectory() as folder:
        job = job_of(case, "" if other == "child" else other)
        return numbers(run(Path(folder), job, *case.words(), "--out", f"{folder}/runs")["folder"])


def words_of(row: Row, case: Case, victim: int) -> tuple[list[str], list[str]]:
    """Options of its run, and its faults. The last of an option that is given twice counts."""
    known = {"rank=R": [victim], "rank=O": [(victim + 1) % case.ranks], "rank=A": range(case.ranks), "rank=0": [0]}
    faults = [
        text.replace(word, f"rank={rank}")
        for text in row.faults
        for word, ranks in known.items()
        if word in text
        for rank in ranks
    ]
    held = [HOLD] if row.outside and row.job != "script" else []
    return [*case.words(), *row.options, *(f"--fault={text}" for text in faults + held)], faults


def tried(row: Row, case: Case, victim: int, undisturbed: str) -> dict[str, Any]:
    """A run with a fault, and what the oracles say of it."""
    words, faults = words_of(row, case, victim)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder)
        words = [*words, "--out", str(out / "runs"), job_of(case, row.job)]
        done = run(out, *words, outside=row.outside, rank=victim)
        resumed = run(out, "--resume", str(done["folder"])) if row.resumed else {"code": 0, "left_over": []}
        record = done["folder"] / "run.json"
        record = json.loads(record.read_text()) if record.exists() else {}
        happened = done["folder"] / "faults.jsonl"
        count = (
            sum("slow" not in line or not row.outside for line in happened.read_text().splitlines())
            if happened.exists()
            else 0
        )
        bitwise = numbers(done["folder"]) == undisturbed
        child = (out / "child").read_text() if row.job == "child" else ""
        folders = [path.name for path in (out / "runs").iterdir()]
    sessions = record.get("sessions", [])
    first = sessions[0] if sessions else {}
    at = row.step or int(faults[0].partition("step=")[2].partition(",")[0])
    lives = f"process {child} sleeping"
    left = [*done["left_over"], *resumed["left_over"]]
    judged = {
        "happened": count == len(faults) and done["done"] == ([row.outside] if row.outside else []),
        "named": named(row, first, victim, at, done["text"].replace(child, "CHILD") if child else done["text"]),
        "exit code": done["code"] == row.code,
        "resumed": resumed["code"] == 0,
        "attempts": len(sessions) == row.attempts + row.resumed,
        "bitwise": bitwise or not row.numbers,
        "nothing left": left == ([lives] if child else []),
        "no other folder": len(folders) == (0 if row.says == GONE else 1),
        "no traceback": row.kind == "raised" or "Traceback" not in done["text"],
    }
    facts = {
        "row": row.name,
        "plan": case.settings,
        "technique": case.technique,
        "ranks": case.ranks,
        "victim": victim,
        "held": all(judged.values()),
        **{
            f"seconds_to_{what}": middle([s.get(f"seconds_to_{what}") for s in sessions]) for what in ("detect", "step")
        },
        "steps_lost": sum(s.get("steps_lost", 0) for s in sessions),
    }
    if facts["held"]:
        return facts
    wrong = [name for name, right in judged.items() if not right]
    seen = {name: first.get(name) for name in ("kind", "rank", "step")} | {
        "exit_code": done["code"],
        "done": done["done"],
    }
    return facts | {
        "wrong": wrong,
        "seen": seen,
        "left_over": left,
        "said": (done["text"] + resumed.get("text", ""))[-1500:],
    }


def named(row: Row, first: dict[str, Any], victim: int, step: int, text: str) -> bool:
    """Whether the record of the first attempt has the rank, the kind and the step, and the run said what it should."""
    said = all(part.replace("rank R", f"rank {victim}") in text for part in row.says.split(" … "))
    if not row.kind:
        return said and "kind" not in first
    right = first.get("kind") == row.kind and (row.any_rank or first.get("rank") == victim)
    return said and right and (first.get("step") == step or row.name == "nan" or step == ANY)


def middle(values: Sequence[float | None]) -> float | None:
    """The median of what is known."""
    known = [value for value in values if value is not None]
    return median(known) if known else None


def ending(fault: str) -> dict[str, Any]:
    """A job that fails this way on two workers, and is not started again: seconds from the fault to the end."""
    words = ["--devices", "2xcpu", "--log-every", "10", "--restarts", "0"]
    with tempfile.TemporaryDirectory() as folder:
        done = run(Path(folder), f"{TESTS / 'jobs_that_fail.py'}:job_{fault}", *words, "--out", f"{folder}/runs")
        seconds = done["end"] - float((Path(folder) / "stamp").read_text())
    return {"seconds": seconds, "exit_code": done["code"], "left_over": done["left_over"]}


def next_pair(pairs: Sequence[tuple[Row, Case]], tries: Sequence[dict[str, Any]]) -> tuple[Row, Case]:
    """The row and the plan whose meeting is rarest so far: by technique, then by number of ranks, then itself."""
    seen = Counter[tuple[str, ...]]()
    for one in tries:
        seen.update([(one["row"], one["technique"]), (one["row"], str(one["ranks"])), (one["row"], "=", one["plan"])])

    def rarity(pair: tuple[Row, Case]) -> tuple[int, int, int]:
        row, case = pair
        keys = ((row.name, case.technique), (row.name, str(case.ranks)), (row.name, "=", case.settings))
        return seen[keys[0]], seen[keys[1]], seen[keys[2]]

    return min(pairs, key=rarity)


def print_table(tries: Sequence[dict[str, Any]]) -> None:
    """Held of tried, rows by techniques, with the medians of a row."""
    techniques = list(dict.fromkeys(case.technique for case in CASES))
    print(f"{'':22}" + "".join(f"{name:>13}" for name in [*techniques, "noticed", "steps again"]))
    for row in [row for row in ROWS if any(one["row"] == row.name for one in tries)]:
        mine = [one for one in tries if one["row"] == row.name]
        cells = [[one["held"] for one in mine if one["technique"] == name] for name in techniques]
        texts = [f"{sum(cell)} of {len(cell)}" if cell else "–" for cell in cells]
        times = [middle([one[f"seconds_to_{what}"] for one in mine]) for what in ("detect", "step")]
        texts += ["–" if value is None else f"{value:.2f} s" for value in times]
        print(f"{row.name:22}" + "".join(f"{text:>13}" for text in texts))
    print(f"held {sum(one['held'] for one in tries)} of {len(tries)}")


def short(result: dict[str, Any]) -> dict[str, Any]:
    """How many tries of each fault held, and how soon it was told and the next step was done, medians."""
    rows: dict[str, list[dict[str, Any]]] = {}
    for one in result["tries"]:
        rows.setdefault(one["row"], []).append(one)

    def of(tries: list[dict[str, Any]]) -> str:
        times = [
            [one[word] for one in tries if one.get(word) is not None]
            for word in ("seconds_to_detect", "seconds_to_step")
        ]
        seconds = ", ".join(f"{median(each):.2f} s" if each else "–" for each in times)
        return f"{sum(one['held'] for one in tries)} of {len(tries)}: {seconds}"

    told = {name: of(tries) for name, tries in rows.items()}
    return {"claim": result["claim"], "tries": len(result["tries"]), "faults": told, "ends": result.get("ends", {})}


def main() -> None:
    """Measure, keep after each run, print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", default="", help="rows with this in their name")
    parser.add_argument("--plans", nargs="*", default=[], help="plans as the table of this file writes them")
    parser.add_argument("--tries", type=int, default=1, help="of every row under every plan")
    parser.add_argument("--minutes", type=float, default=1e9, help="begin no run after this time")
    parser.add_argument("--anew", action="store_true", help="forget what was measured before")
    parser.add_argument("--name", default="faults", help="of the result")
    given = parser.parse_args()
    until = time.monotonic() + 60 * given.minutes
    result = {} if given.anew else kept(given.name)
    tries: list[dict[str, Any]] = result.setdefault("tries", [])
    result["claim"] = " ".join((__doc__ or "").partition("Claim: ")[2].split())
    pairs = [(row, case) for row in ROWS for case in CASES if applies(row, case) and given.only in row.name]
    pairs = [pair for pair in pairs if not given.plans or pair[1].settings in given.plans]
    numbers_of: dict[tuple[str, str], str] = {}
    if not given.only and "ends" not in result:
        result["ends"] = {fault: ending(fault) for fault in ENDS}
    done = Counter((one["row"], one["plan"]) for one in tries)
    while time.monotonic() < until and (left := [p for p in pairs if done[p[0].name, p[1].settings] < given.tries]):
        row, case = next_pair(left, tries)
        if row.numbers and (case.settings, row.job) not in numbers_of:
            numbers_of[case.settings, row.job] = numbers_without(case, row.job)
        victim = (ROWS.index(row) + sum(one["row"] == row.name for one in tries)) % case.ranks
        tries.append(one := tried(row, case, victim, numbers_of.get((case.settings, row.job), "")))
        done[row.name, case.settings] += 1
        wrong = "held" if one["held"] else f"FAILED: {', '.join(one['wrong'])} {one['seen']} {one['left_over']}"
        print(f"{row.name:20} {case.settings:32} rank {victim}  {wrong}", flush=True)
        keep(given.name, short(result), result)
    print_table(tries)


if __name__ == "__main__":
    main()
