"""Show what a run did, in every form: `meshwise report`."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from meshwise import reports
from meshwise.reports.views.registry import VIEWS
from meshwise.spec.errors import UsageError
from meshwise.spec.options import Option
from meshwise.terminal.command_line import from_dataclass

app = typer.Typer(add_completion=False)
ViewOptions = dataclasses.make_dataclass(
    "ViewOptions",
    [(name, Annotated[bool, Option(view.help)], dataclasses.field(default=False)) for name, view in VIEWS.items()],
)
"""A dataclass with one option for each view of a report."""


@app.command()
@from_dataclass
def report(
    folder: Annotated[
        str | None, typer.Argument(metavar="RUN", help="a run: its folder, or its name in runs; default: the newest")
    ] = None,
    other: Annotated[str | None, typer.Argument(metavar="RUN2", help="a run to compare it with")] = None,
    views: ViewOptions = ViewOptions(),  # type: ignore[valid-type]  # noqa: B008
    to: Annotated[str | None, typer.Option(metavar="DIR", help="where files are written; default: RUN")] = None,
    live: Annotated[bool, typer.Option("--live", help="follow the run while it runs")] = False,
    steps: Annotated[str | None, typer.Option(metavar="A:B", help="show these steps span by span")] = None,
) -> None:
    """Say what limited a run, and show where its time and memory went. With two runs, compare them.

    \b
    meshwise report                    the newest run, on one screen
    meshwise report RUN --html         a page that works offline
    meshwise report RUN RUN2           two runs, compared
    meshwise report RUN --live         follow a run while it runs
    meshwise report --steps 100:104    these steps, span by span
    """
    console, run, span = Console(), reports.report.run_folder(folder), reports.report.step_range(steps)
    wanted = [name for name, given in vars(views).items() if given]
    _refuse_together([*wanted, *["live"] * live, *["steps"] * (span is not None)], other)
    to_folder = Path(to) if to else run
    if live:
        reports.views.follow.follow(run, console)
    elif other is not None:
        _print_comparison(console, run, other, as_json=bool(wanted))
    else:
        _print_views(console, run, wanted, to_folder, span)


def _print_comparison(console: Console, run: Path, other: str, *, as_json: bool) -> None:
    compared = reports.report.compare(run, other)
    if as_json:
        print(json.dumps(reports.compare_runs.comparison_dict(compared), indent=2))
    else:
        console.print(reports.views.run_text.run_comparison_text(compared), soft_wrap=True)


def _print_views(console: Console, run: Path, wanted: list[str], to_folder: Path, span: tuple[int, int] | None) -> None:
    found, printed, written = reports.report.report_views(run, wanted, to_folder, span)
    if not wanted:
        console.print(reports.views.report_text.report_text(found))
    for text in printed:
        print(text)
    for path in written:
        print(f"written     {path}", file=sys.stderr if printed else sys.stdout)


def _refuse_together(options: list[str], other: str | None) -> None:
    """Raise UsageError if `meshwise report` cannot combine these options, or cannot combine them with a second run.

    options: the names of the given options, without dashes.
    other: the second run (RUN2) of a comparison. None if the command shows only one run."""
    if other is not None and set(options) - {"json"}:
        raise UsageError("Two runs are compared as text or with --json alone. Leave out RUN2 or the other options.")
    if "live" in options and len(options) > 1:
        raise UsageError("--live cannot be combined with other options.")
    printing = [f"--{name}" for name in options if name in VIEWS and not VIEWS[name].file]
    if len(printing) > 1:
        raise UsageError(f"Only one view can print to the terminal. Choose between {' and '.join(printing)}.")
