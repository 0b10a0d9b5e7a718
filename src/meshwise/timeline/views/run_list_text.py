"""Show the runs of a folder as a table.

Tested in tests/cli/test_runs.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import RenderableType
from rich.text import Text

from meshwise.records.run_list import RunEntry
from meshwise.spec.units import bytes_text, plural, seconds_text
from meshwise.terminal.screen import Drawn, Screen
from meshwise.terminal.table import table_lines
from meshwise.timeline.views.summary_text import metric_value

COLOURS = {"failed": "red", "unreadable": "red", "running": "green", "stopped": "yellow", "queued": "cyan"}
HINTS = (
    "meshwise logs RUN    what it printed, and what Slurm's launcher showed",
    "meshwise stop RUN    save and end it for good, queued or running",
    "meshwise submit RUN  send a stopped or failed one again",
)
"""Hints that are shown below the table if some of its runs were submitted to Slurm."""


def run_list_text(entries: Sequence[RunEntry], folder: Path) -> RenderableType:
    """Draw a table with a row for each run, the oldest first. A last line has the number of runs and their total
    size."""
    return Drawn(lambda screen: _lines(entries, folder, screen))


def _lines(entries: Sequence[RunEntry], folder: Path, screen: Screen) -> list[Text]:
    if not entries:
        return screen.wrap(Text(f"No such run in {folder}/. `meshwise run` makes one; --in DIR lists another folder."))
    titles, rows = ["run", "job", "plan", "status", "metric", "last", "best", "time", "size"], list(map(_row, entries))
    sent = any(entry.scheduler_job for entry in entries)
    if sent:
        titles.insert(3, "Slurm")
        for row, entry in zip(rows, entries, strict=True):
            row.insert(3, f"{entry.scheduler_job} {entry.partition}".rstrip())
    table = table_lines(titles, rows, screen.table_width, left=(0, 1, 2, 3, 4, *([5] if sent else [])))
    total = f"{plural(len(entries), 'run')}, {bytes_text(sum(entry.size for entry in entries))}"
    hints = [Text(line, "dim") for line in HINTS] if sent else []
    return [*table, Text(), *hints, Text(total, "dim")]


def _row(entry: RunEntry) -> list[str | Text]:
    values = ["" if value is None else metric_value(entry.metric, value) for value in (entry.last, entry.best)]
    time = "" if entry.seconds is None else seconds_text(entry.seconds)
    times = f", {len(entry.attempts)} attempts" if len(entry.attempts) > 1 else ""
    queue = f", {entry.queue}" if entry.queue else ""
    status = Text(f"{entry.status}{queue}{times}", COLOURS.get(entry.status, ""))
    job = entry.job if len(entry.job) <= 30 else f"…{entry.job[-29:]}"
    args = entry.args if len(entry.args) <= 30 else f"{entry.args[:29]}…"
    what = f"{job} {args}".rstrip()
    return [entry.name, what, entry.plan, status, entry.metric, *values, time, bytes_text(entry.size)]
