"""The runs of a folder as a table. Tested in tests/cli/test_runs.py."""

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


def run_list_text(entries: Sequence[RunEntry], folder: Path) -> RenderableType:
    """A row a run, the oldest first, and how many there are."""
    return Drawn(lambda screen: _lines(entries, folder, screen))


def _lines(entries: Sequence[RunEntry], folder: Path, screen: Screen) -> list[Text]:
    if not entries:
        return screen.wrap(Text(f"No such run in {folder}/. `meshwise run` makes one; --in DIR lists another folder."))
    titles = ["run", "job", "plan", "status", "metric", "last", "best", "time", "size"]
    table = table_lines(titles, [_row(entry) for entry in entries], screen.table_width, left=(0, 1, 2, 3, 4))
    total = f"{plural(len(entries), 'run')}, {bytes_text(sum(entry.size for entry in entries))}"
    return [*table, Text(), Text(total, "dim")]


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
