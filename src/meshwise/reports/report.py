"""Make a run's report and its views, and compare two runs."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from meshwise.records import folder as names
from meshwise.records.files import atomic_file
from meshwise.records.run_list import find_run
from meshwise.reports.analyse import report_of
from meshwise.reports.compare_runs import RunComparison, compare_runs
from meshwise.reports.read import read_timeline
from meshwise.reports.run_report import Report
from meshwise.reports.step_table import step_table_of
from meshwise.reports.views.registry import VIEWS
from meshwise.reports.views.report_text import report_text
from meshwise.reports.views.run_text import RunSummary, run_comparison_text
from meshwise.spec.errors import UsageError
from meshwise.terminal.notebook import Page, shown_by

RUNS = Path("runs")
shown_by(Report, report_text)
shown_by(RunComparison, run_comparison_text)


def figure(report: Report) -> Page:
    """Return the page of a run to show in a notebook. It is the page that `meshwise report --html` writes."""
    page = VIEWS["html"].render(report, read_timeline(Path(report.folder)))
    return Page(str(page))


setattr(Report, "figure", figure)  # noqa: B010  # set here, since `Report` does not import views


def report(run: str | Path | RunSummary | None = None, *, steps: tuple[int, int] | None = None) -> Report:
    """Report what a run did: where its time and memory went, which rank is a straggler, and what limited the run.

    run: the folder or the name of a run, or what `mw.run` returned. None is the newest run in `runs`.
    steps: the first and the last step to show span by span.

    Raises UsageError if there is no such run.
    """
    folder = run_folder(run.folder if isinstance(run, RunSummary) else run)
    return report_of(read_timeline(folder), str(folder), steps)


def compare(first: str | Path, second: str | Path) -> RunComparison:
    """Compare two runs: the time of a step by kind of time, and figures of each run as a whole, such as throughput."""
    runs = []
    for run in (first, second):
        folder = run_folder(run)
        timeline = read_timeline(folder)
        table = step_table_of(timeline)
        runs.append((table, report_of(timeline, str(folder), table=table)))
    return compare_runs(*runs)


def report_views(
    folder: Path, wanted: Iterable[str], to: Path, steps: tuple[int, int] | None
) -> tuple[Report, list[str], list[Path]]:
    """Make views of a run. Return its report, the texts to print, and the paths of written files."""
    timeline = read_timeline(folder)
    found = report_of(timeline, str(folder), steps)
    printed, written = [], []
    for view in map(VIEWS.__getitem__, wanted):
        content = view.render(found, timeline)
        if not view.file:
            printed.append(str(content))
            continue
        try:
            with atomic_file(to / view.file) as file:
                file.writelines([content.encode()] if isinstance(content, str) else content)
        except OSError as error:
            text = f"{to} cannot be written ({error.strerror}). Name another folder with --to DIR."
            raise UsageError(text) from None
        written.append(to / view.file)
    return found, printed, written


def run_folder(run: str | Path | None) -> Path:
    """Return the folder of a run, given its path or name; None is the newest run. Raises UsageError if there is
    none."""
    folder = names.newest_run(RUNS) if run is None else Path(run)
    folder = folder if folder.exists() else find_run(RUNS, str(run))
    names.read_run(folder)
    return folder


def step_range(text: str | None) -> tuple[int, int] | None:
    """Parse `--steps 100:110` as the first and the last step. None if not given.
    Raises UsageError for other text."""
    if text is None:
        return None
    first, _, last = text.partition(":")
    if not first.isdigit() or not (last or first).isdigit() or int(last or first) < int(first):
        raise UsageError(f"--steps must be the first and the last step, such as 100:110, but it is {text}.")
    return int(first), int(last or first)
