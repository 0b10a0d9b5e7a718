"""`meshwise report`: what a run did, in every form."""

from __future__ import annotations

import dataclasses
import json
import sys
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from meshwise.api.report import compare, report_views, run_folder, step_range
from meshwise.commands.command_line import from_dataclass
from meshwise.spec.errors import UsageError
from meshwise.spec.options import Option
from meshwise.timeline.compare_runs import comparison_dict
from meshwise.timeline.views.follow import follow
from meshwise.timeline.views.registry import VIEWS
from meshwise.timeline.views.report_text import report_text
from meshwise.timeline.views.run_comparison_text import run_comparison_text

app = typer.Typer()
ViewOptions = dataclasses.make_dataclass(
    "ViewOptions",
    [(name, Annotated[bool, Option(view.help)], dataclasses.field(default=False)) for name, view in VIEWS.items()],
)
"""An option for each view."""


@app.command()
@from_dataclass
def report(
    folder: Annotated[
        str | None, typer.Argument(metavar="RUN", help="the folder of a run; default: the newest in runs")
    ] = None,
    other: Annotated[str | None, typer.Argument(metavar="RUN2", help="a run to compare it with")] = None,
    views: ViewOptions = ViewOptions(),  # type: ignore[valid-type]  # noqa: B008
    to: Annotated[str | None, typer.Option(metavar="DIR", help="where files are written; default: RUN")] = None,
    live: Annotated[bool, typer.Option("--live", help="follow a running one")] = False,
    steps: Annotated[str | None, typer.Option(metavar="A:B", help="show these steps span by span")] = None,
) -> None:
    """Say what limited a run, and show where its time and memory went. With two runs, compare them."""
    console, run, span = Console(), run_folder(folder), step_range(steps)
    wanted = [name for name, given in vars(views).items() if given]
    _refuse_together([*wanted, *["live"] * live, *["steps"] * (span is not None)], other)
    to_folder = Path(to) if to else run
    if live:
        follow(run, console, also=partial(report_views, run, wanted, to_folder) if wanted else None)
    elif other is not None:
        compared = compare(run, other)
        if wanted:
            print(json.dumps(comparison_dict(compared), indent=2))
        else:
            console.print(run_comparison_text(compared), soft_wrap=True)
    else:
        found, printed, written = report_views(run, wanted, to_folder, span)
        if not wanted:
            console.print(report_text(found))
        for text in printed:
            print(text)
        for path in written:
            print(f"written     {path}", file=sys.stderr if printed else sys.stdout)


def _refuse_together(options: list[str], other: str | None) -> None:
    """Refuse options that exclude each other."""
    shown = ", ".join(f"--{name}" for name in options)
    if other is not None and set(options) - {"json"}:
        raise UsageError(f"RUN2 and {shown}: two runs are compared as text or with --json alone.")
    if "live" in options and set(options) - {"live", "openmetrics"}:
        raise UsageError(f"{shown}: --live goes with --openmetrics alone.")
    printing = [f"--{name}" for name in options if name in VIEWS and not VIEWS[name].file]
    if len(printing) > 1:
        raise UsageError(f"{' and '.join(printing)} both print: choose one.")
