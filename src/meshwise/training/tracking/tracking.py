"""Send a run's numbers to metrics.jsonl and trackers; provide `mw.log`.

Only rank 0 sends the numbers.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import math
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from torch import Tensor

from meshwise.records import folder as names
from meshwise.records.claims import is_over, newest
from meshwise.records.files import Record, append_lines, read_lines
from meshwise.spec.errors import UsageError
from meshwise.spec.json_values import json_value
from meshwise.spec.user_code import user_place
from meshwise.spec.words import error_text
from meshwise.training.process import session
from meshwise.training.tracking.trackers import OpenTracker, Tracker, check_trackers, open_tracker
from meshwise.workers.environment import LOG, RUN_FOLDER, attempt
from meshwise.workers.join import rank_context

Point = tuple[Mapping[str, float], int]
"""Values by name, and the step to which they belong."""


class Tracking:
    """Writes the numbers of a run on rank 0, to metrics.jsonl and to trackers. A tracker that fails is reported once
    and then left out."""

    def __init__(self, folder: Path | None, trackers: Iterable[str | Tracker], notify: Callable[[str], None]) -> None:
        """folder: the folder of the run, in which metrics.jsonl is written."""
        self._folder, self._notify = folder, notify
        self._first, self._wanted = trackers, list[str | Tracker]()
        self._open: list[OpenTracker] = []
        self._unwritten, self._said = list[Record](), False
        self.found = self.written = 0
        """Numbers of lines in metrics.jsonl: `found` from earlier attempts, `written` by this object."""
        self._held: BinaryIO | None = None
        """The file metrics.jsonl as this attempt opened it. A later attempt on other machines replaces the file."""
        self._over = False

    def open(self, step: int) -> None:
        """Open the trackers."""
        self._hold()
        self.add(self._first, step)

    def _hold(self) -> None:
        if self._folder is None:
            return
        path, claimed = self._folder / names.METRICS, newest(self._folder) > 0
        if claimed:  # create this attempt's own file before a later attempt can
            with contextlib.suppress(OSError):
                path.open("xb").close()
        if path.is_file():
            self._release()
            self._held = path.open("rb")
        # Check this after opening the file, because the file may be that of a later attempt.
        self._over = claimed and is_over(self._folder, attempt())

    def _release(self) -> None:
        held, self._held = self._held, None
        if held is not None:
            held.close()

    def add(self, trackers: Iterable[str | Tracker], step: int) -> None:
        """Open trackers, except those that are open already."""
        for wanted in trackers:
            if wanted not in self._wanted:
                self._wanted.append(wanted)
                with self._optional(wanted if isinstance(wanted, str) else "tracker"):
                    self._open.append(open_tracker(wanted, self._folder or Path(), step))

    def write(self, records: Sequence[Record], points: Iterable[Point]) -> None:
        """Append the records to metrics.jsonl, and pass the points to each tracker."""
        if self._folder is not None:
            self._unwritten += map(json_value, records)
            self._append(self._folder / names.METRICS)
        points = list(points)
        for tracker in [*self._open]:
            with self._optional(tracker.name, tracker):
                for values, step in points:
                    tracker.track(values, step)

    def _append(self, path: Path) -> None:
        """Append all unwritten records, also earlier records that did not fit on a full disk."""
        try:
            if self._held is None:
                self._hold()
            if self._over:
                return
            append_lines(path, self._unwritten, self._held)
            self.written += len(self._unwritten)
            self._unwritten = []
            if self._held is None:
                self._hold()
        except OSError as error:
            if not self._said:
                self._notify(f"{path} cannot be written ({error.strerror}). The run continues, and tries again.")
            self._said = True

    def cut(self, lines: int) -> None:
        """Remove the lines that earlier attempts wrote to metrics.jsonl, except the first `lines` lines."""
        if self._folder is not None and lines < self.found:
            numbers, found = itertools.count(), self.found
            with contextlib.suppress(OSError):  # the lines stay if the disk is full
                names.keep_metrics(self._folder, attempt(), lambda record: not lines <= next(numbers) < found)
            self.found = lines
            self._hold()

    def close(self) -> None:
        """Write the lines of metrics.jsonl that could not be written earlier, and close the trackers."""
        if self._folder is not None and self._unwritten:
            self._append(self._folder / names.METRICS)
            if self._unwritten and not self._over:
                self._notify(f"{len(self._unwritten)} lines of {names.METRICS} could not be written and are lost.")
        self._release()
        while self._open:
            tracker = self._open.pop()
            with self._optional(tracker.name):
                tracker.close()

    @contextlib.contextmanager
    def _optional(self, name: str, tracker: OpenTracker | None = None) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # a failing tracker must not stop training
            if tracker is not None:
                self._open.remove(tracker)
            self._notify(f"log={name} failed and gets no more values. The run continues. {error_text(error)}")


_Target = tuple[Tracking | None, Callable[[], int | None]]
"""Where `mw.log` writes, and a function that returns the step."""
_targets: list[_Target] = []
"""The script's own target, and the targets of the open `log_into` blocks. `mw.log` writes to the last target."""
_calls: Counter[str] = Counter()


@contextlib.contextmanager
def log_into(tracking: Tracking | None, step: Callable[[], int | None]) -> Iterator[None]:
    """Let `mw.log` write to `tracking` inside the with block, or write nothing if it is None."""
    target = tracking, step
    _targets.append(target)
    try:
        yield
    finally:
        _targets.remove(target)


def nowhere() -> contextlib.AbstractContextManager[None]:
    """Let `mw.log` write nothing inside the with block."""
    return log_into(None, lambda: None)


def has_logged() -> bool:
    """Return whether this process has called `mw.log`."""
    return bool(_calls)


def log(values: Mapping[str, Any] | None = None, /, *, step: int | None = None, **named: Any) -> None:
    """Log numbers of the program: `mw.log(loss=loss, lr=lr)`.

    The numbers are written to metrics.jsonl in the run's folder, which reports and `meshwise runs` read. They are also
    sent to the trackers of `meshwise run --log wandb`. Without a run folder or tracker (MESHWISE_RUN, MESHWISE_LOG),
    nothing is kept. A tensor of one number is read, which waits for its device. Only rank 0's values are kept. Call it
    on every rank, or under `if mw.is_main():`.

    Log what `mw.backward` returns, or `mw.mean(value)`: a rank's own loss covers only its own samples.

    values: numbers whose names are not Python identifiers: `mw.log({"val/accuracy": accuracy})`.
    step: the step of the numbers. By default it is the optimizer step since the process started, so a script that
        resumes from a saved state should pass its own. Without mw.distribute it is the number of calls from this source
        line.

    Raises UsageError for values that are not numbers.
    """
    numbers = {name: _number(name, value) for name, value in ({**(values or {}), **named}).items()}
    session.show(", ".join(f"{name} {value!r}" for name, value in numbers.items()))
    place = user_place()
    _calls[place] += 1
    tracking, now = _target()
    if tracking is not None and rank_context().world.rank == 0:
        at = now() if step is None else step
        at = _calls[place] if at is None else at
        tracking.write([{**numbers, "step": at}], [(numbers, at)])


def log_to(*trackers: str | Tracker) -> None:
    """Send later values of `mw.log` to these trackers too: `mw.log_to(track)`, `mw.log_to("wandb")`.

    Call `mw.log_to` on every rank. A tracker that fails is reported once and dropped. Raises UsageError for an unknown
    name, or if the tracker's library is not installed.

    trackers: your functions `track(values, step)`, called on rank 0 with a dict of numbers by name, or the names
        `tensorboard`, `wandb`, `mlflow`, as with `meshwise run --log`.
    """
    for tracker in trackers:
        if not (isinstance(tracker, str) or callable(tracker)):
            raise UsageError(f"mw.log_to: {tracker!r} is not a tracker. Use a function track(values, step) or 'wandb'.")
    check_trackers([tracker for tracker in trackers if isinstance(tracker, str)])
    tracking, step = _target()
    if tracking is not None and rank_context().world.rank == 0:
        tracking.add(trackers, step() or 0)


def logged() -> dict[str, Any]:
    """Return the run's folder and the number of lines in metrics.jsonl, to save with a state."""
    folder, tracking = _folder(), _of_script()
    if folder is None or tracking is None:
        return {}
    return {"run": str(folder.resolve()), "lines": tracking.found + tracking.written}


def go_on_after(state: Mapping[str, Any]) -> None:
    """Cut metrics.jsonl to the lines that it had when `logged` returned `state`."""
    folder, tracking = _folder(), _of_script()
    if folder is not None and tracking is not None and state.get("run") == str(folder.resolve()):
        tracking.cut(state["lines"])


def _of_script() -> Tracking | None:
    return (_targets or [_target()])[0][0]


def _folder() -> Path | None:
    return Path(os.environ[RUN_FOLDER]) if RUN_FOLDER in os.environ else None


def _target() -> _Target:
    """Return the target of `mw.log`. The first call makes the script's own target."""
    if not _targets:
        first, folder, wanted = rank_context().world.rank == 0, _folder(), os.environ.get(LOG, "").split(",")
        wanted = [name for name in wanted if name]
        check_trackers(wanted)
        tracking = Tracking(folder, wanted if first else (), session.tell)
        if folder is not None and first:
            if newest(folder):
                names.keep_metrics(folder, attempt())  # replaces the file, which an earlier attempt may still have open
            tracking.found = len(read_lines(folder / names.METRICS))
        tracking.open(0)
        atexit.register(tracking.close)
        _targets.append((tracking, lambda: session.default_engine().phases.step if session.has_begun() else None))
    return _targets[-1]


def _number(name: str, value: Any) -> float:
    if name == "step":
        raise UsageError("mw.log: 'step' cannot be the name of a value. To set the step, write mw.log(..., step=n).")
    if isinstance(value, Tensor | np.ndarray | np.generic):
        if math.prod(value.shape) != 1:
            shape = tuple(value.shape)
            raise UsageError(f"mw.log: {name} has the shape {shape}. Log one number, such as {name}.mean().")
        value = value.item()
    if not isinstance(value, int | float):
        raise UsageError(f"mw.log: {name} must be a number, but it is a {type(value).__name__}.")
    return float(value) if isinstance(value, bool) else value
