"""Supervise a run's workers: show messages, handle signals, restart after failures.

tests/faults and tests/cli/test_run_folder.py use real workers.
"""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import cycle, islice
from pathlib import Path
from typing import Any, BinaryIO

from rich.console import Console

from meshwise.launcher.devices_left import DevicesLeft
from meshwise.launcher.restarts import Restarts, ended
from meshwise.records import folder as names
from meshwise.records.attempts import lost_texts, open_log
from meshwise.records.files import is_lost
from meshwise.records.lock import FolderLock
from meshwise.reports.analyse import report_of
from meshwise.reports.read import read_timeline
from meshwise.reports.views.live_progress import LiveView, TrainingProgress
from meshwise.reports.views.run_text import RunSummary, WholeRun, metric_text
from meshwise.spec.devices import WorkerSlot
from meshwise.spec.errors import PlanError, WorkerFailed
from meshwise.spec.exit_codes import AGAIN, DONE, WARNINGS, stop_text
from meshwise.spec.plan import Plan
from meshwise.spec.units import plural
from meshwise.terminal.screen import fitted
from meshwise.training.job.options import PRELOAD
from meshwise.workers.channel import Message
from meshwise.workers.fork_server import Forks
from meshwise.workers.gate import Halt, StepGate
from meshwise.workers.launch import launch
from meshwise.workers.meeting import Meeting
from meshwise.workers.watched import Listeners

STOPS = (signal.SIGINT, signal.SIGHUP, *WARNINGS)
"""Signals to the launcher that end the run. All ranks stop after the same step."""


@dataclass(frozen=True)
class LaunchedProgram:
    """A job or script to run."""

    name: str
    plan: Plan | None
    call: Callable[[Path], Any]
    record: Mapping[str, Any]
    sees_all: bool = False
    again: Callable[..., Any] | None = None


@dataclass
class Started:
    """A program with its run folder, and the workers and machines on which it runs.

    meeting: the launchers of all machines. None on one machine.
    shares: whether the machines see one run folder, so that only machine 0 writes the run's record.
    before: the files of the folder that the start has changed, with their former text.
    """

    program: LaunchedProgram
    folder: Path
    slots: Sequence[WorkerSlot]
    restarts: Restarts
    meeting: Meeting | None = None
    shares: bool = True
    before: Mapping[Path, str] = field(default_factory=dict)
    hang_limit: float | None = None
    lock: FolderLock | None = None

    @property
    def world(self) -> int:
        """The number of ranks on all machines."""
        return self.meeting.size if self.meeting else len(self.slots)

    @property
    def first_rank(self) -> int:
        """The lowest rank of this machine."""
        return self.meeting.first_rank if self.meeting else 0

    @property
    def keeps_record(self) -> bool:
        """Whether this machine writes the run folder's files that belong to no single rank, such as run.json."""
        return (self.meeting is None or self.meeting.node == 0 or not self.shares) and self.restarts.is_current

    def close(self) -> None:
        """Release the lock on the folder."""
        if self.lock is not None:
            self.lock.close()


class Viewer:
    """Shows a run to the user. It prints what the messages of the run's workers report."""

    def __init__(self, view: LiveView, started: Started, halt: Halt | StepGate, *, live: bool) -> None:
        """live: whether the view redraws progress."""
        self._view, self._started, self._halt, self._live = view, started, halt, live
        self._restarts = started.restarts
        self.stopped = ""
        self._memory: list[int | None] = [None] * len(started.slots)
        self._lost, self._looked = False, time.monotonic()
        self._told: list[str] = []
        """The messages of the attempt that are recorded in run.json."""

    def message(self, rank: int, message: Message) -> None:
        kind = message["kind"]
        if kind == "began" and rank == self._started.first_rank:
            self._told = []
            self._keep(self._restarts.began(message["step"]))
        elif kind == "stepped":
            self._keep(self._restarts.stepped())
        elif kind == "restores":
            self._restarts.resumable, self._restarts.states = True, Path(message["folder"])
        elif kind == "memory" and rank < len(self._memory):
            self._memory[rank] = message["bytes"]
        elif kind == "log" or (kind == "progress" and self._live):
            self._view.update(self._progress(message))
        elif kind == "evaluated":
            self._view.print(metrics_line(message))
        elif kind == "stopping" and rank == 0:
            epoch = "" if message["epoch"] is None else f" (epoch {message['epoch']})"
            self.stops(f" after step {message['step']}{epoch}", message.get("saves", False))
        elif kind == "told":
            self._told.append(message["text"])
            self._keep({"told": self._told})
            self._view.print(fitted(message["text"], sys.stdout))
        elif kind == "note":
            self._view.print(fitted(message["text"], sys.stdout))

    def look(self) -> None:
        """Check at most once a second whether the run folder is gone. Tell the user once if it is."""
        if not self._lost and time.monotonic() - self._looked > 1.0:
            self._looked, self._lost = time.monotonic(), is_lost(self._restarts.folder)
            if self._lost:
                where = self._restarts.folder
                self._view.print(f"{where} was removed or moved. The run continues, but writes no records or states.")

    def stops(self, where: str = "", saves: bool = False) -> None:
        """Tell the user that the run is stopped, and by which signal."""
        if not self.stopped:
            self.stopped = f"stopped by {stop_text(self._halt.signal)}{where}"
            self._view.print(self.stopped)
            if not (saves or self._restarts.resumable):
                self._view.print("no state is saved: the script has not called mw.checkpoint.")

    def _keep(self, facts: Mapping[str, Any]) -> None:
        if facts and self._started.keeps_record:
            names.add_to_session(self._restarts.folder, **facts)

    def send(self, kind: str, **facts: Any) -> None:
        """Handle a message of this process like one from a worker.
        Used if another launcher started the run."""
        self.message(0, {"kind": kind, **facts})

    def output(self, stream: str, text: str) -> None:
        self._view.print(text.rstrip("\n"))

    def _progress(self, message: Message) -> TrainingProgress:
        facts = {name: value for name, value in message.items() if name != "kind"}
        return TrainingProgress(self._started.program.name, memory=tuple(self._memory), **facts)


def metrics_line(message: Mapping[str, Any]) -> str:
    """Return a line such as `epoch 1/5 test accuracy 95.20 % loss 0.1612 best so far`."""
    step = f", step {message['inside']}" if "inside" in message else ""
    parts = [metric_text(name, value) for name, value in message["metrics"].items()]
    parts += ["best so far"] if message["best"] else []
    return f"epoch {message['epoch']}/{message['epochs']}{step}  test {'  '.join(parts)}"


def supervise(
    started: Started, console: Console, limit: float | None = None, forks: Forks | None = None
) -> tuple[list[Any], int]:
    """Launch workers, show the run, and restart it while `restarts` allows.
    Return the results and the exit code."""
    restarts, meeting = started.restarts, started.meeting
    halt, forks = Halt(), forks or Forks(PRELOAD)
    with LiveView(console) as view, forwarded_signals(halt, view), halt.after(limit):
        devices, viewer = DevicesLeft(started.slots), Viewer(view, started, halt, live=view.draws)

        def log(folder: Path, rank: int) -> BinaryIO:
            return open_log(folder, rank, restarts.number)

        listeners = Listeners(viewer.message, viewer.output, viewer.look, log, started.hang_limit)
        launches = partial(launch, folder=restarts.folder, listeners=listeners, halt=halt, preload=forks)
        try:
            results = None
            while results is None:
                try:
                    results = launches(_task(started), (), devices.used, meeting=meeting)
                except WorkerFailed as error:
                    _answer(error, started, view, halt, devices)
            code = _record_end(started, viewer, halt)
        finally:
            if meeting is not None:
                meeting.leave()
            forks.close()
            restarts.close(view.print)
    return results, code


def _record_end(started: Started, viewer: Viewer, halt: Halt) -> int:
    """Record how the run has ended. Return the exit code, which is that of machine 0 on every machine: an engine starts
    only those again that do not end with 0, and they would wait for the others."""
    folder, meeting, stopped = started.folder, started.meeting, halt.wanted
    if stopped:
        viewer.stops()
    if is_lost(folder):
        raise WorkerFailed(
            f"{folder} was removed or moved during the run. The records and states that the run would have written "
            "there are lost."
        )
    if started.keeps_record:
        facts = {"reason": viewer.stopped.removeprefix("stopped by ")} if stopped else {}
        names.end_session(folder, "stopped" if stopped else "finished", **facts)
    code = halt.exit_code if stopped else DONE
    if meeting is not None:
        meeting.set("ended", code)
        code = int(meeting.get(0, "ended"))
    return code


def _task(started: Started) -> Callable[[], Any]:
    """Return what the workers of the next attempt call."""
    program, restarts = started.program, started.restarts
    call: Callable[..., Any] = program.call
    if restarts.attempt > 1 and program.again is not None:
        call = partial(program.again, plan=restarts.plan, resumes=restarts.resumes)
    return restarts.attempted(call)


def _answer(error: WorkerFailed, started: Started, view: LiveView, halt: Halt, devices: DevicesLeft) -> None:
    """Record how an attempt failed. Then begin the next attempt, or raise the error that ends the run."""
    restarts = started.restarts
    devices.failed(error.failure, restarts.attempt, restarts.happened_now())
    last = error if halt.wanted else restarts.after(error)
    goes_on = ""
    if last is None:
        try:
            used = restarts.fit(devices.left(restarts.attempt + 1))
            if used != len(devices.used):
                restarts.moves_to(plural(used, "device"))
            devices.use(used)
            goes_on = restarts.next()
        except PlanError as refused:
            last = ended(error, str(refused), AGAIN)
    error = last or error
    if keeps := started.keeps_record:
        status = "stopped" if error.rank is None else "failed"
        names.end_session(restarts.folder, status, str(error), **restarts.facts(error))
    if error.rank is not None:
        restarts.run_command(str(error), again=last is None)
    if last is not None:
        raise last
    view.print(fitted(f"{error}\n{goes_on}", sys.stdout))
    if keeps:
        restarts.keep_plan()
        facts = {"devices": [slot.name for slot in devices.used], "world": len(devices.used), "machine": 0}
        restarts.number = names.begin_session(restarts.folder, time.time(), restarts.record(), **facts)


@contextlib.contextmanager
def forwarded_signals(halt: Halt, view: LiveView) -> Iterator[None]:
    """Inside the `with` block, stop all ranks after the same step when this process gets a signal of STOPS."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    came = set[int]()

    def stop(number: int, frame: object) -> None:
        again = number in came or halt.signal != number
        if halt.wanted and number == signal.SIGINT and again:
            halt.at_once = True
        came.add(number)
        halt.ask(number)

    before = {number: signal.signal(number, stop) for number in STOPS}
    try:
        yield
    finally:
        leaves = halt.wanted and halt.exit_code == AGAIN  # the scheduler that asked for the stop may repeat its signal
        for number, handler in before.items():
            signal.signal(number, signal.SIG_IGN if leaves and number in WARNINGS else handler)


def summarise(results: Sequence[Mapping[str, Any]], plan: str, slots: Sequence[WorkerSlot], folder: Path) -> RunSummary:
    """Return a summary of what a run did since it was last started."""
    timeline = read_timeline(folder)
    report, first = report_of(timeline.newest_session(), str(folder)), results[0]
    began, sessions = first["began"], timeline.sessions
    seconds = sum(session.ended - session.began for session in sessions) / 1e9
    return RunSummary(
        **{name: first[name] for name in ("job", "status", "samples", "metrics", "best")},
        plan=plan,
        devices=tuple(islice(cycle(slot.name for slot in slots), max(len(report.ranks), len(slots)))),
        epochs=first["epochs"] - began["epoch"],
        steps=first["steps"] - began["step"],
        seconds=report.wall_seconds,
        train_seconds=min((sum(rank.seconds.values()) for rank in report.ranks), default=0.0),
        samples_per_second=report.samples_per_second or 0.0,
        phases=tuple(dict(rank.seconds) for rank in report.ranks),
        verdict=report.verdict,
        memory=tuple(result["memory"] for result in results),
        folder=str(folder),
        notes=(*first["notes"], *lost_texts(timeline.facts)),
        whole=WholeRun(len(sessions), first["epochs"], first["steps"], seconds) if len(sessions) > 1 else None,
    )
