"""Send a run's numbers to metrics.jsonl and trackers; provide `mw.log`.

Only rank 0 sends the numbers.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
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
        self._wanted = list(dict.fromkeys(trackers))
        self._open: list[OpenTracker] = []
        self._unwritten: list[Record] = []
        self.found = self.written = 0
        """Numbers of lines in metrics.jsonl: `found` from earlier attempts, `written` by this object."""
        self._held: BinaryIO | None = None
        """The file metrics.jsonl as this attempt opened it. A later attempt on other machines replaces the file."""
        self._over = False

    def open(self, step: int) -> None:
        """Open the trackers."""
        self._hold()
        self._open_now(self._wanted, step)

    def _hold(self) -> None:
        if self._folder is None:
            return
        path, claimed = self._folder / names.METRICS, newest(self._folder) > 0
        if claimed:  # of this attempt's own, before a later one can make it
            with contextlib.suppress(OSError):
                path.open("xb").close()
        if path.is_file():
            if self._held is not None:
                self._held.close()
            self._held = path.open("rb")
        self._over = claimed and is_over(self._folder, attempt())  # asked last: it may be the file of a later one

    def add(self, trackers: Iterable[str | Tracker], step: int) -> None:
        """Open more trackers, except those that are open already."""
        new = [tracker for tracker in dict.fromkeys(trackers) if tracker not in self._wanted]
        self._wanted += new
        self._open_now(new, step)

    def _open_now(self, trackers: Iterable[str | Tracker], step: int) -> None:
        for wanted in trackers:
            with self._optional(wanted if isinstance(wanted, str) else "tracker"):
                self._open.append(open_tracker(wanted, self._folder or Path(), step))

    def write(self, records: Sequence[Record], points: Iterable[Point]) -> None:
        """Append the records to metrics.jsonl, and pass the points to each tracker."""
        self._write(self._folder, records)
        points = list(points)
        for tracker in [*self._open]:
            with self._optional(tracker.name, tracker):
                for values, step in points:
                    tracker.track(values, step)

    def _write(self, folder: Path | None, records: Sequence[Record]) -> None:
        """Append records to metrics.jsonl."""
        if folder is None:
            return
        first, records = not self._unwritten, [*self._unwritten, *map(json_value, records)]
        try:
            if self._held is None:
                self._hold()
            if self._over:
                return
            append_lines(folder / names.METRICS, records, self._held)
            if self._held is None:
                self._hold()
        except OSError as error:
            self._unwritten = records
            if first:
                where = folder / names.METRICS
                self._notify(f"{where} cannot be written ({error.strerror}). The run continues, and tries again.")
        else:
            self.written += len(records)
            self._unwritten = []

    def cut(self, lines: int) -> None:
        """Remove the lines that earlier attempts wrote to metrics.jsonl, except the first `lines` lines."""
        if self._folder is not None and lines < self.found:
            _cut(self._folder, lines, self.found)
            self.found = lines
            self._hold()

    def close(self) -> None:
        """Write the lines of metrics.jsonl that could not be written earlier, for example because the disk was full."""
        if self._unwritten:
            self._write(self._folder, ())
        if self._unwritten:
            self._notify(f"{len(self._unwritten)} lines of {names.METRICS} could not be written and are lost.")
        if self._held is not None:
            self._held.close()
            self._held = None
        while self._open:
            tracker = self._open.pop()
            with self._optional(tracker.name):
                tracker.close()

    @contextlib.contextmanager
    def _optional(self, name: str, tracker: OpenTracker | None = None) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # a training is worth more than its pictures
            if tracker is not None:
                self._open.remove(tracker)
            self._notify(f"log={name} failed and gets no more values. The run continues. {error_text(error)}")


@dataclass(frozen=True)
class _Target:
    """Where `mw.log` writes at the moment."""

    tracking: Tracking
    step: Callable[[], int | None]
    kept: bool = True


_targets: list[_Target] = []
"""The script's own target, and the targets of the open `log_into` blocks. `mw.log` writes to the last target."""
_calls: Counter[str] = Counter()


@contextlib.contextmanager
def log_into(tracking: Tracking, step: Callable[[], int | None], *, kept: bool = True) -> Iterator[None]:
    """Let `mw.log` write to `tracking` inside the with block."""
    target = _Target(tracking, step, kept)
    _targets.append(target)
    try:
        yield
    finally:
        _targets.remove(target)


def nowhere() -> contextlib.AbstractContextManager[None]:
    """Let `mw.log` write nothing inside the with block."""
    return log_into(Tracking(None, (), lambda text: None), lambda: None, kept=False)


def has_logged() -> bool:
    """Return whether this process has called `mw.log`."""
    return bool(_calls)


def log(values: Mapping[str, Any] | None = None, /, *, step: int | None = None, **named: Any) -> None:
    """Log numbers of the program: `mw.log(loss=loss, lr=lr)`.

    The numbers are written to metrics.jsonl in the run's folder, which reports and `meshwise runs` read. They are also
    sent to the trackers of `meshwise run --log wandb`. Without a run folder or tracker (MESHWISE_RUN, MESHWISE_LOG),
    nothing is kept. A tensor of one number is read, which waits for its device. Only rank 0's values are kept. Call it
    on every rank, or under `if mw.is_main():`.

    Log what `mw.backward` returns, or `mw.mean(value)`: a rank's own loss is one of its own samples.

    values: numbers whose names are not Python identifiers: `mw.log({"val/accuracy": accuracy})`.
    step: the step of the numbers. By default it is the optimizer step since the process started, so a script that
        resumes from a saved state should pass its own. Without mw.distribute it is the number of calls from this source
        line.

    Raises UsageError for values that are not numbers.
    """
    numbers = {name: _number(name, value) for name, value in ({**(values or {}), **named}).items()}
    session.show(", ".join(f"{name} {value!r}" for name, value in numbers.items()))
    place, context = user_place(), rank_context()
    _calls[place] += 1
    target = _target()
    if context.world.rank == 0:
        at = target.step() if step is None else step
        at = _calls[place] if at is None else at
        target.tracking.write([{**numbers, "step": at}], [(numbers, at)])


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
    target = _target()
    if target.kept and rank_context().world.rank == 0:
        target.tracking.add(trackers, target.step() or 0)


def logged() -> dict[str, Any]:
    """Return the run's folder and the number of lines in metrics.jsonl, to be saved with the state of a training."""
    folder = _folder()
    if folder is None:
        return {}
    lines = _targets[0].tracking.found + _targets[0].tracking.written if _targets else _lines(folder)
    return {"run": str(folder.resolve()), "lines": lines}


def go_on_after(state: Mapping[str, Any]) -> None:
    """Continue metrics.jsonl after a saved state is loaded."""
    folder = _folder()
    if folder is None or rank_context().world.rank != 0 or state.get("run") != str(folder.resolve()):
        return
    if _targets:
        _targets[0].tracking.cut(state["lines"])
    elif state["lines"] < (found := _lines(folder)):
        _cut(folder, state["lines"], found)


def _cut(folder: Path, first: int, last: int) -> None:
    numbers = itertools.count()
    with contextlib.suppress(OSError):  # a full disk: they stay
        names.keep_metrics(folder, attempt(), lambda record: not first <= next(numbers) < last)


def _lines(folder: Path | None) -> int:
    return 0 if folder is None else len(read_lines(folder / names.METRICS))


def _folder() -> Path | None:
    return Path(os.environ[RUN_FOLDER]) if RUN_FOLDER in os.environ else None


def _target() -> _Target:
    if not _targets:
        _targets.append(_of_script(rank_context().world.rank == 0))
    return _targets[-1]


def _of_script(first: bool) -> _Target:
    """Make the target of `mw.log` in a script."""
    wanted = [name for name in os.environ.get(LOG, "").split(",") if name]
    check_trackers(wanted)
    folder = _folder()
    if folder is not None and first and newest(folder):
        names.keep_metrics(folder, attempt())  # a file of this attempt's own
    tracking = Tracking(folder, wanted if first else (), session.tell)
    tracking.open(0)
    tracking.found = _lines(folder) if first else 0
    atexit.register(tracking.close)
    return _Target(tracking, lambda: session.default_engine().phases.step if session.has_begun() else None)


def _number(name: str, value: Any) -> float:
    if name == "step":
        raise UsageError("mw.log: 'step' cannot be the name of a value. To set the step, write mw.log(..., step=n).")
    if isinstance(value, Tensor | np.ndarray | np.generic):
        if value.size != 1 if isinstance(value, np.ndarray) else isinstance(value, Tensor) and value.numel() != 1:
            raise UsageError(
                f"mw.log: {name} has the shape {tuple(value.shape)}. Log one number, such as {name}.mean()."
            )
        value = value.item()
    if not isinstance(value, int | float):
        raise UsageError(f"mw.log: {name} must be a number, but it is a {type(value).__name__}.")
    return float(value) if isinstance(value, bool) else value
