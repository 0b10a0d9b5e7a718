"""Follow a run from outside, updating its report until it ends.

Following only reads the run's folder, so it can start and stop at any time, on any machine that sees the folder. Of a
long run, only the newest part is read and shown.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console, Group, RenderableType
from rich.text import Text

from meshwise.records import folder as names
from meshwise.records.metrics import Metrics
from meshwise.reports.analyse import report_of
from meshwise.reports.read import SILENT, read_timeline
from meshwise.reports.run_report import Report
from meshwise.reports.spans import Timeline
from meshwise.reports.views.live_progress import LiveView, quiet_live
from meshwise.reports.views.report_text import report_text
from meshwise.spec.errors import UsageError
from meshwise.spec.units import count_text, seconds_text, whole_seconds_text
from meshwise.terminal.kind_marks import printable

BLOCKS = 40
"""How many of the newest blocks of each rank's log of spans are read. A worker writes a block of spans every second."""
LINE_EVERY = 10.0
SHARE = 0.25
"""The largest fraction of one core's time that may be spent on reading the files of the run."""
UNREADABLE = (UsageError, OSError, ValueError, LookupError, TypeError)  # raised by reading a file that is being written


@dataclass(frozen=True)
class Snapshot:
    """The state of a run at one moment."""

    report: Report | None
    running: bool
    files: Mapping[Path, tuple[int, int]]
    window: float | None = None
    metrics: Metrics | None = None


def follow(folder: Path, console: Console, *, every: float = 1.0, stop: Callable[[], bool] | None = None) -> None:
    """Show a run until it ends, Ctrl-C is pressed, or `stop` returns True."""
    names.read_run(folder)
    view = LiveView(console)  # wraps the console, so that drawing raises no error if the terminal closes
    live = quiet_live(console, screen=True)
    snapshot: Snapshot | None = None
    printed, words = -math.inf, ""
    with contextlib.suppress(KeyboardInterrupt):
        with live if view.draws else contextlib.nullcontext():
            while stop is None or not stop():
                began = time.monotonic()
                snapshot = poll(folder, snapshot)
                if not snapshot.running:
                    break
                if view.draws:
                    live.update(screen(snapshot, console), refresh=True)
                else:
                    if began - printed >= LINE_EVERY:
                        view.print(line_of(snapshot))
                        printed = began
                    before, words = words, silence(snapshot)
                    if words and not before:
                        view.print(words)
                took = time.monotonic() - began
                time.sleep(max(every - took, took / SHARE - took, 0.0))
            else:
                return
        console.print(report_text(report_of(read_timeline(folder), str(folder))))


def poll(folder: Path, before: Snapshot | None = None) -> Snapshot:
    """Take a snapshot of the run. Return `before` if no file has changed since."""
    files, metrics = _files(folder), before.metrics if before is not None and before.metrics else Metrics(folder)
    if before is not None and files == before.files and before.report is not None:
        return before
    try:
        running = names.read_run(folder).get("status") == "running"
        timeline = read_timeline(folder, last_blocks=BLOCKS, metrics=metrics)
        report, window = _of_now(timeline, report_of(timeline, str(folder)), running)
    except UNREADABLE:
        return dataclasses.replace(before or Snapshot(None, True, files), files=files, metrics=metrics)
    return Snapshot(report, running, files, window, metrics)


def _files(folder: Path) -> dict[Path, tuple[int, int]]:
    """Return the run's record and the files of its spans, each with its last change (ns) and size in bytes."""
    found = {}
    for path in [folder / names.RUN, *(folder / names.SPANS).glob("rank*.jsonl")]:
        with contextlib.suppress(OSError):
            facts = path.stat()
            found[path] = facts.st_mtime_ns, facts.st_size
    return found


def _of_now(timeline: Timeline, report: Report, running: bool) -> tuple[Report, float | None]:
    """Return the report to show, and how many seconds of the run it covers (None: all)."""
    steps = timeline.spans["step"]
    if not running:
        return report, None
    if not (steps > 0).any():
        started = dataclasses.replace(report, missing=[], verdict="No step yet: the workers are starting.")
        return started, None
    if steps[steps > 0].min() == 1:
        return report, None
    window = float(timeline.spans["end"].max() - timeline.spans["start"].min()) / 1e9
    part = dataclasses.replace(report, steps=int(steps.max()), samples_per_second=None, goodput=[], waiting=[])
    return part, window


def silence(snapshot: Snapshot) -> str:
    """Return a warning if the logs of a run have not grown for SILENT seconds. Return "" otherwise."""
    seconds = time.time() - max((changed for changed, _ in snapshot.files.values()), default=math.inf) / 1e9
    if seconds <= SILENT:
        return ""
    return (
        f"No log has grown for {whole_seconds_text(seconds)}: the run's launcher may have been killed "
        "(run.json still has it as running), or a step takes that long."
    )


def line_of(snapshot: Snapshot) -> str:
    """Describe the state of the run in one line: `running  step 1,234  43 ms a step  Compute-bound: ...`."""
    report = snapshot.report
    if report is None:
        return "running  its files cannot be read yet"
    if not report.steps:
        return f"{report.status}  {report.verdict}"
    step = f"step {count_text(report.steps)}  {seconds_text(report.step_seconds)} a step"
    return f"{report.status}  {step}  {report.verdict}"


def screen(snapshot: Snapshot, console: Console) -> RenderableType:
    """Draw the report on the whole screen."""
    words = silence(snapshot)
    of = "" if snapshot.window is None else f"of the newest {whole_seconds_text(snapshot.window)} · "
    foot = Text(words, "bold yellow") if words else Text(f"{of}Ctrl-C leaves; the run continues", "dim")
    foot.plain = printable(foot.plain, console.options.ascii_only)
    height = console.height - len(foot.wrap(console, console.width))
    if snapshot.report is None:
        return Group(Text("Its files cannot be read yet."), foot)
    return Group(report_text(snapshot.report, None, height), foot)
