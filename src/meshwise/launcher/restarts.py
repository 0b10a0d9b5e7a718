"""Decide whether a failed run restarts, and record each attempt.

An attempt is one start of a run's workers. Another attempt begins after a fault of a machine, but not after an
exception of the program.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from meshwise.records import folder as names
from meshwise.records.checkpoints import checkpoints_in
from meshwise.records.claims import is_over, write_of
from meshwise.records.files import is_lost, read_lines
from meshwise.spec.errors import PlanError, WorkerFailed
from meshwise.spec.exit_codes import AGAIN, FAILED, NO_PROGRESS, under_scheduler
from meshwise.spec.faults import Fault
from meshwise.spec.plan import Plan
from meshwise.spec.plan_devices import on_devices
from meshwise.spec.plan_file import plan_from_toml, plan_to_toml
from meshwise.training import recording
from meshwise.workers.environment import ATTEMPT, read_world
from meshwise.workers.failure import recorded
from meshwise.workers.place import place_in

NOT_SAVED = "The run is not started again, because the program saves no state. Call mw.checkpoint in the program."
STARTED_AGAIN = "Started again, the run goes on from its last saved state"
MOST_WITHOUT_PROGRESS = 3
COMMAND_TIMEOUT = 30.0  # seconds to wait at the end for commands of --on-failure that still run


@dataclass
class Restarts:
    """The attempts of one command to run a program. Each start of the workers is an attempt."""

    folder: Path
    most: int = 0
    resumable: bool = True
    alone: bool = True
    """Whether the run has one machine. On several machines, the engine or the user starts the run again."""
    command: str | None = None
    faults: Sequence[Fault] = ()
    asked: Plan | None = None
    """The plan with which the run was started. None if a script chooses its own plan."""
    states: Path | None = None
    """The folder in which a script saves its state. None if the script saves its state in the run's folder."""
    attempt: int = 1
    """The number of the current attempt within this command, from 1."""
    number: int = 1
    """The number of the current attempt within the run. A resumed run counts the attempts of earlier commands, too."""
    step: int = 0
    """The last step that all ranks are known to have finished."""
    failed: float | None = None
    """When the previous attempt failed (time.monotonic). None once the workers have made a step again."""
    smaller: str = ""
    """The plan (TOML) with which the run continues after it ran out of memory. Empty if it never ran out of memory."""
    resumes: bool = False
    """Whether the attempt resumes from a saved state."""
    plan_now: Plan | None = None
    """The plan with which the run continues. None before the first restart."""
    _change: str = ""
    _furthest: int = 0
    _without_progress: int = 0
    _last: tuple[int, str, int] | None = None
    _commands: list[subprocess.Popen[bytes]] = field(default_factory=list)

    @property
    def is_current(self) -> bool:
        """Whether the run folder is there, and no later attempt has begun in it."""
        return not is_lost(self.folder) and not is_over(self.folder, self.number)

    def due(self) -> tuple[Fault, ...]:
        """Return the faults to inject in this attempt."""
        return tuple(fault for fault in self.faults if fault.attempt == self.attempt)

    def attempted(self, call: Callable[[Path], Any]) -> Callable[[], Any]:
        """Return a function that runs `call(folder)` in a worker, as this attempt and with its faults."""
        return partial(_in_attempt, self.number, self.due(), call, self.folder)

    def after(self, error: WorkerFailed) -> WorkerFailed | None:
        """Return None if the run restarts after an attempt that failed with `error`, otherwise the error to raise."""
        failure = error.failure
        self.step = max(self.step, failure.done if failure is not None else 0)
        if failure is None or (self.most == 0 and self.alone):
            return error
        again = f"{STARTED_AGAIN}."
        if failure.smaller and self.resumable:
            self.smaller, changed = failure.smaller
            self.most, self._last = self.most + 1, None
            self._change = f"with {changed}, and the same numbers"
            if self.alone:
                return None
            self.plan_now = plan_from_toml(self.smaller)
            self.keep_plan()
            again = f"{STARTED_AGAIN}, {self._change}."
        elif not failure.of_machine:
            return error
        if not self.resumable:
            return ended(error, NOT_SAVED, error.exit_code if self.alone else AGAIN)
        if not self.alone:
            return ended(error, again, AGAIN)
        this = None if failure.step is None else (failure.rank, failure.kind, failure.step)
        self._without_progress = 0 if self.step > self._furthest else self._without_progress + 1
        self._furthest = max(self.step, self._furthest)
        if this is not None and this == self._last:
            why = f"The program itself fails: rank {failure.rank} failed alike in step {failure.step} of two attempts."
            return ended(error, why, FAILED)
        self._last = this
        if self._without_progress >= MOST_WITHOUT_PROGRESS:
            why = f"{MOST_WITHOUT_PROGRESS} attempts in a row made no progress: the run is not started again."
            return ended(error, why, NO_PROGRESS)
        if self.attempt > self.most:
            left = f"That was attempt {self.attempt} of {self.most + 1}. To continue: meshwise run --resume"
            return ended(error, f"{left} {shlex.quote(str(self.folder))}", AGAIN)
        return None

    def happened_now(self) -> list[Fault]:
        """Return the injected faults of this attempt that have happened."""
        happened = {line.get("fault") for line in self._happened() if line.get("attempt") == self.number}
        return [fault for fault in self.due() if str(fault) in happened]

    def fit(self, devices: int) -> int:
        """Adapt the plan to at most `devices` devices, and return how many it uses."""
        plan = plan_from_toml(self.smaller) if self.smaller else self.asked
        if plan is not None:
            self.plan_now = on_devices(plan, devices)
            return self.plan_now.devices
        if not devices:
            raise PlanError("no device is left on which the run could continue.")
        return devices

    @property
    def plan(self) -> str:
        """The plan with which the run continues, as TOML. Empty if it is the first plan."""
        return "" if self.plan_now in (None, self.asked) else plan_to_toml(self.plan_now)

    def moves_to(self, where: str) -> None:
        """Record that the next attempt runs on other devices. where: these devices in words, such as `4 devices`."""
        under = "" if self.plan_now is None else f" under {self.plan_now}"
        self._change = ", ".join(filter(None, [self._change, f"on {where}{under}"]))

    def next(self) -> str:
        """Begin the next attempt. Return a sentence on the step from which it begins."""
        self.attempt, self.failed = self.attempt + 1, time.monotonic()
        newest = [] if self.states is None else checkpoints_in(self.states)[-1:]
        saved = newest[0].step if newest else names.saved_step(self.folder)
        self.resumes = saved is not None
        where = "from the beginning: no state was saved" if saved is None else f"from the state saved at step {saved}"
        change, self._change = f", {self._change}" if self._change else "", ""
        return f"attempt {self.attempt} of {self.most + 1} begins {where}{change}."

    def keep_plan(self) -> None:
        """Record the plan of the next attempt in the run folder."""
        path = self.folder / names.PLAN
        there = plan_from_toml(path.read_text(encoding="utf-8")) if path.is_file() else None
        if self.plan_now not in (None, there):
            content = plan_to_toml(self.plan_now).encode()
            write_of(self.folder, self.number, path, lambda file: file.write(content))
        if self.smaller:
            request = names.read_run(self.folder).get("request", {})
            names.change_run(self.folder, request={**request, "plan": self.smaller, "settings": None})

    def record(self) -> dict[str, Any]:
        """Return the facts to record when an attempt begins."""
        faults = {"faults": [str(fault) for fault in self.due()]} if self.due() else {}
        return {**place_in(os.environ).record(), **faults}

    def facts(self, error: WorkerFailed) -> dict[str, Any]:
        """Return the facts to record about an attempt that failed with `error`."""
        told = {} if error.failure is None else recorded(error.failure)
        times = [line["time"] for line in self._happened() if line.get("attempt") == self.number]
        return told | ({"seconds_to_detect": time.time() - max(times)} if times else {})

    def began(self, step: int) -> dict[str, Any]:
        """Note that the workers begin after `step`, and return facts to record."""
        lost, self.step = max(0, self.step - step), step
        return {"from_step": step} | ({} if self.failed is None else {"steps_lost": lost})

    def stepped(self) -> dict[str, Any]:
        """Note that the workers have made a step, and return facts to record."""
        since, self.failed = self.failed, None
        return {} if since is None else {"seconds_to_step": time.monotonic() - since}

    def run_command(self, text: str, again: bool) -> None:
        """Start the shell command of --on-failure, without waiting for its end."""
        if self.command is None:
            return
        facts = {"FAILURE": text, "RUN": str(self.folder), "ATTEMPT": str(self.number), "AGAIN": str(int(again))}
        variables = os.environ | {f"MESHWISE_{name}": value for name, value in facts.items()}
        self._commands.append(subprocess.Popen(self.command, shell=True, env=variables, stdin=subprocess.DEVNULL))

    def close(self, say: Callable[[str], None]) -> None:
        """Wait a limited time for the commands of --on-failure, and report faults that did not happen."""
        for process in self._commands:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(COMMAND_TIMEOUT)
        happened = {(line.get("fault"), line.get("attempt")) for line in self._happened()}
        first = self.number - self.attempt
        for fault in () if is_lost(self.folder) else self.faults:
            if (str(fault), first + fault.attempt) not in happened:
                say(f"--fault {fault} did not happen: its rank did not come to its step in that attempt.")

    def _happened(self) -> list[Mapping[str, Any]]:
        """Return the records of injected faults that have happened in the run."""
        return list(read_lines(self.folder / names.FAULTS)) if self.faults else []


def _in_attempt(number: int, faults: Sequence[Fault], call: Callable[[Path], Any], folder: Path) -> Any:
    os.environ[ATTEMPT] = str(number)
    if faults:
        recording.faults.arm(faults, read_world(os.environ).rank, folder)
    return call(folder)


def refuse_without_progress(folder: Path, facts: Mapping[str, Any]) -> None:
    """Raise WorkerFailed if a run that an engine starts makes no progress: its last three attempts began at the same
    step."""
    submission, sessions = facts.get("submission", {}), facts.get("sessions", [])
    if not (submission or under_scheduler()):
        return
    last = [one for one in sessions if one["began"] >= submission.get("sent", 0.0)][-MOST_WITHOUT_PROGRESS:]
    here = names.saved_step(folder) or 0
    if len(last) == MOST_WITHOUT_PROGRESS and all(one.get("from_step", 0) == here for one in last):
        raise WorkerFailed(
            f"{MOST_WITHOUT_PROGRESS} attempts in a row made no progress after step {here}, so the run is not started "
            f"again. Look at meshwise logs {folder.name}, then submit it again: meshwise submit {folder}",
            rank=None,
            exit_code=NO_PROGRESS,
        )


def ended(error: WorkerFailed, why: str, code: int) -> WorkerFailed:
    """Return `error` with exit code `code` and a longer message. why: the reason why the run ends, added to the
    message."""
    return WorkerFailed(f"{error}\n{why}", rank=error.rank, exit_code=code, failure=error.failure)
