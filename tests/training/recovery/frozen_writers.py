"""A process of attempt 1 that stands still (SIGSTOP) before a line of its choice, and wakes while attempt 2 runs.

For tests/training/recovery/test_frozen.py and bench/frozen_ranks.py. Each process is a rank 0 with its launcher's work:
it saves states, logs, writes weights and the record of the run, by the code that runs do it with.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn

from meshwise.records import folder as names
from meshwise.records.checkpoints import checkpoints_in, verified
from meshwise.records.claims import claims_of, newest_record
from meshwise.records.files import read_lines
from meshwise.spec.errors import SaveError
from meshwise.spec.saves import Saves
from meshwise.spec.world import World
from meshwise.training.recovery.saving import Saver
from meshwise.training.recovery.weights import save_weights
from meshwise.training.tracking.tracking import Tracking
from tests.training.recovery.dying_writers import FolderStore, writing

WRITERS = (
    *(
        "training/recovery/writing.py",
        "training/recovery/saving.py",
        "training/recovery/weights.py",
        "training/recovery/tensor_files.py",
    ),
    *(
        "records/checkpoints.py",
        "records/claims.py",
        "records/files.py",
        "records/folder.py",
        "training/tracking/tracking.py",
    ),
)
WAITS = ("_awaited", "_settle", "settle")
KINDS = ("save", "metrics", "record", "weights", "other rank")
SENTENCE = "a later attempt of this run began while this attempt was frozen or cut off"


@dataclass
class Rank:
    """Rank 0 of an attempt, in a process of its own. keep: how many states."""

    folder: Path
    number: int
    keep: int

    def begins(self) -> None:
        """Claim the attempt, and open what it writes into."""
        os.environ["MESHWISE_ATTEMPT"] = str(self.number)
        assert names.claim_session(self.folder, self.number)
        assert names.begin_session(self.folder, 1e9 + self.number, world=1) == self.number
        names.keep_metrics(self.folder, self.number)
        self.tracking = Tracking(self.folder, (), lambda text: None)
        self.tracking.open(0)
        self.saver = Saver(self.folder / names.CHECKPOINTS, World(), self._said, saves=Saves(keep=self.keep))

    def _said(self, text: str) -> None:
        """What a run would show."""

    def save(self, step: int) -> None:
        state = {"step": step, "w": torch.full((1000,), float(step + self.number))}
        self.saver.save(lambda: state, {"step": step}, wait=True)
        self.saver.settle()

    def log(self, step: int) -> None:
        self.tracking.write([{"epoch": self.number, "step": step, "loss": 1 / step}], ())

    def weigh(self, step: int) -> None:
        model = nn.Linear(4, 4)
        nn.init.constant_(model.weight, float(step + self.number))
        nn.init.constant_(model.bias, 0.0)
        save_weights(model, self.folder / names.WEIGHTS)

    def record(self, step: int) -> None:
        names.add_to_session(self.folder, step=step)
        names.end_session(self.folder, "failed", f"of attempt {self.number}, at step {step}")

    def save_as_rank_1(self, step: int) -> None:
        words = self.folder / f"board-{step}"
        words.mkdir()
        store = FolderStore(words)
        store.set(f"save{step}/whole", "")  # as if rank 0 had said so
        writing(1, step, self.folder / names.CHECKPOINTS, store).run()

    def work(self, step: int) -> None:
        """All that a run writes at a step."""
        self.save(step)
        self.log(step)
        self.weigh(step)
        names.add_to_session(self.folder, step=step)


def _traced(work: Callable[[], object], stops_at: int | None) -> int:
    """Do it, and stand still before line number `stops_at` of what writes. Returns how many lines that were."""
    lines, lock = 0, threading.Lock()

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal lines
        if not frame.f_code.co_filename.endswith(WRITERS):
            return None
        if event == "line" and frame.f_code.co_name not in WAITS:
            with lock:
                lines += 1
                stands = lines == stops_at
            if stands:
                os.kill(os.getpid(), signal.SIGSTOP)
        return trace

    threading.settrace(trace)
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(None)
        threading.settrace(None)  # type: ignore[arg-type]
    return lines


def _in_a_child(work: Callable[[], int | None], told: Path) -> int:
    """Work in a process of its own, which leaves what came of it in the file `told`."""
    pid = os.fork()
    if pid:
        return pid
    try:
        text = str(work())
    except BaseException as error:
        text = f"{type(error).__name__}: {error}"
    told.write_text(text)
    os._exit(0)


def _first(folder: Path, kind: str, stops_at: int | None) -> int:
    """Attempt 1: three steps of work, then one thing more, in which it stands still; at the end it finds out."""
    rank = Rank(folder, 1, keep=2)
    rank.begins()
    for step in (4, 8):
        rank.work(step)
    kinds = {
        "save": rank.save,
        "metrics": rank.log,
        "record": rank.record,
        "weights": rank.weigh,
        "other rank": rank.save_as_rank_1,
    }
    lines = _traced(lambda: kinds[kind](12), stops_at)
    if stops_at is not None:
        rank.save(16)  # what it does next
    return lines


def _second(folder: Path, ready: int, goes_on: int) -> None:
    """Attempt 2: it begins, works, and works again once the first one has woken."""
    rank = Rank(folder, 2, keep=9)
    rank.begins()
    rank.work(10)
    os.write(ready, b"x")
    os.read(goes_on, 1)
    rank.work(14)
    names.end_session(folder, "finished")


def lines_of(folder: Path, kind: str) -> int:
    """How many lines what writes runs in this."""
    folder.mkdir()
    told = folder.with_suffix(".told")
    os.waitpid(_in_a_child(lambda: _first(folder, kind, None), told), 0)
    return int(told.read_text())


def read_by_others(folder: Path) -> dict[str, bytes]:
    """Every byte that anyone reads of a run."""
    found = [path for each in checkpoints_in(folder / names.CHECKPOINTS) for path in each.path.iterdir()]
    record = newest_record(folder)
    found += [folder / name for name in (names.RUN, names.METRICS, names.WEIGHTS)] + ([record] if record else [])
    return {str(path.relative_to(folder)): path.read_bytes() for path in found if path.is_file()}


def woken(folder: Path, kind: str, at: int) -> list[str]:
    """Attempt 1 stands still before this line, attempt 2 begins and works, the first one wakes, the second one ends:
    what was changed that must not be."""
    folder.mkdir()
    told = [folder.with_suffix(f".{number}") for number in (1, 2)]
    first = _in_a_child(lambda: _first(folder, kind, at), told[0])
    _, status = os.waitpid(first, os.WUNTRACED)
    if not os.WIFSTOPPED(status):
        return [f"it did not stand still: {told[0].read_text()}"]
    (ready, set_ready), (goes_on, go_on) = os.pipe(), os.pipe()
    second = _in_a_child(lambda: _second(folder, set_ready, goes_on), told[1])
    os.close(set_ready)
    wrong = []
    if os.read(ready, 1):
        before = read_by_others(folder)
        counted = claims_of(folder)[2]
        os.kill(first, signal.SIGCONT)
        if not _ended(first, 20):
            os.kill(first, signal.SIGKILL)
            os.waitpid(first, 0)
            wrong.append("it did not end")
        after = read_by_others(folder)
        wrong += [f"{name} was changed" for name in {*before, *after} if before.get(name) != after.get(name)]
        os.write(go_on, b"x")
    os.waitpid(second, 0)
    for end in (ready, goes_on, go_on):
        os.close(end)
    if (text := told[1].read_text()) != "None":
        return [*wrong, f"attempt 2: {text}"]
    end = told[0].read_text() if told[0].exists() else ""
    if not (end.startswith(SaveError.__name__) and SENTENCE in end):
        wrong.append(f"it ended without its sentence: {end}")
    return wrong + _at_the_end(folder, before, counted)


def _ended(pid: int, seconds: float) -> bool:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if os.waitpid(pid, os.WNOHANG) != (0, 0):
            return True
        time.sleep(0.002)
    return False


def _at_the_end(folder: Path, before: dict[str, bytes], counted: Any) -> list[str]:
    """What is not as attempts 1 and 2 have left it: what counted of the first as it was, and all of the second."""
    saved, wrong = checkpoints_in(folder / names.CHECKPOINTS), []
    if [each.path.name for each in saved] != [*counted["checkpoints"], "step-00000010.2", "step-00000014.2"]:
        wrong.append(f"the states are {[each.path.name for each in saved]}")
    wrong += [f"{each}: {text}" for each in saved if (text := verified(each))]
    now, written = read_by_others(folder), (names.RUN, names.METRICS, names.WEIGHTS, "attempts/2.run.json")
    wrong += [
        f"{name} is not what it was" for name, held in before.items() if name not in written and now[name] != held
    ]
    if not now[names.METRICS].startswith(before[names.METRICS]):
        wrong.append("metrics.jsonl does not go on")
    of_first = before[names.METRICS][: counted["metrics"]].count(b"\n")
    steps = [(line["epoch"], line["step"]) for line in read_lines(folder / names.METRICS)]
    if steps[of_first:] != [(2, 10), (2, 14)] or any(epoch != 1 for epoch, _ in steps[:of_first]):
        wrong.append(f"the lines of metrics.jsonl are {steps}")
    run = names.read_run(folder)
    if run["status"] != "finished" or [each["step"] for each in run["sessions"]] != [run["sessions"][0]["step"], 14]:
        wrong.append(f"the record is {run}")
    return wrong
