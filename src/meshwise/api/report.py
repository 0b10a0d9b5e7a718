"""What a run did: its report, in every form, and two runs compared."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from meshwise.records import folder as names
from meshwise.records.atomic import write_text
from meshwise.spec.errors import UsageError
from meshwise.timeline.analyse import report_of
from meshwise.timeline.compare_runs import RunComparison
from meshwise.timeline.compare_runs import compare as compare_books
from meshwise.timeline.read import read_timeline
from meshwise.timeline.run_report import Report
from meshwise.timeline.step_table import step_table_of
from meshwise.timeline.views.chrome_trace import write_chrome_trace
from meshwise.timeline.views.html_page import page_html
from meshwise.timeline.views.openmetrics import openmetrics
from meshwise.timeline.views.tensorboard import write_tensorboard

RUNS = Path("runs")
FILES = {
    "html": "report.html",
    "trace": "trace.json.gz",
    "openmetrics": "metrics.prom",
    "tensorboard": "tensorboard/report",
}
"""What `meshwise report` writes, in the run's folder unless told otherwise."""


def report(run: str | Path | None = None, *, steps: tuple[int, int] | None = None) -> Report:
    """What a run did: where its time and memory went, who was late, what limited it.

    run: its folder; None for the newest in `runs`. steps: the first and last step to have span by span.
    Raises UsageError when there is no such run.
    """
    folder = run_folder(run)
    return report_of(read_timeline(folder), str(folder), steps)


def compare(first: str | Path, second: str | Path) -> RunComparison:
    """Two runs, span kind by span kind. Raises UsageError when one of them is no run."""
    told = []
    for run in (first, second):
        folder = run_folder(run)
        timeline = read_timeline(folder)
        table = step_table_of(timeline)
        told.append((table, report_of(timeline, str(folder), table=table)))
    return compare_books(*told)


def report_files(
    folder: Path, to: Path, kinds: Sequence[str], steps: tuple[int, int] | None
) -> tuple[Report, list[Path]]:
    """The report of a run, written in the forms that are asked for: html, trace, openmetrics, tensorboard.

    Returns it and what was written. Raises UsageError where a form needs a library that is missing, or `to` cannot be
    written.
    """
    timeline = read_timeline(folder)
    found = report_of(timeline, str(folder), steps)
    written = []
    try:
        for kind in kinds:
            path = to / FILES[kind]
            to.mkdir(parents=True, exist_ok=True)
            if kind == "html":
                write_text(path, page_html(found))
            elif kind == "trace":
                write_chrome_trace(timeline, found, path, steps)
            elif kind == "openmetrics":
                write_text(path, openmetrics(found))
            else:
                write_tensorboard(timeline, found, path)
            written.append(path)
    except OSError as error:
        raise UsageError(f"{to}: cannot be written ({error.strerror}). Name another folder with --to DIR.") from None
    return found, written


def run_folder(run: str | Path | None) -> Path:
    """The folder of a run; None names the newest in `runs`. Raises UsageError when it is none."""
    folder = names.newest_run(RUNS) if run is None else Path(run)
    names.read_run(folder)
    return folder


def step_range(text: str | None) -> tuple[int, int] | None:
    """`100:110`, or `100` for one step, as first and last step."""
    if text is None:
        return None
    first, _, last = text.partition(":")
    if not first.isdigit() or not (last or first).isdigit() or int(last or first) < int(first):
        raise UsageError(f"--steps {text}: give the first and the last step, for instance --steps 100:110.")
    return int(first), int(last or first)
