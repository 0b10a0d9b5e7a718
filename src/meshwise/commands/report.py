"""`meshwise report`: what a run did, in every form."""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from meshwise.api.report import compare, report_files, run_folder, step_range
from meshwise.spec.errors import UsageError
from meshwise.timeline.compare_runs import comparison_dict
from meshwise.timeline.run_report import report_dict
from meshwise.timeline.views.follow import follow
from meshwise.timeline.views.mermaid import mermaid_gantt
from meshwise.timeline.views.report_text import report_text
from meshwise.timeline.views.run_comparison_text import run_comparison_text

app = typer.Typer()


@app.command()
def report(
    folder: Annotated[
        str | None, typer.Argument(metavar="RUN", help="the folder of a run; default: the newest in runs")
    ] = None,
    other: Annotated[str | None, typer.Argument(metavar="RUN2", help="a run to compare it with")] = None,
    html: Annotated[bool, typer.Option("--html", help="write one page that works offline: report.html")] = False,
    trace: Annotated[bool, typer.Option("--trace", help="write trace.json.gz for Perfetto")] = False,
    openmetrics: Annotated[bool, typer.Option("--openmetrics", help="write metrics.prom for Prometheus")] = False,
    tensorboard: Annotated[bool, typer.Option("--tensorboard", help="write TensorBoard events")] = False,
    to: Annotated[str | None, typer.Option(metavar="DIR", help="where files are written; default: RUN")] = None,
    mermaid: Annotated[bool, typer.Option("--mermaid", help="print the Gantt chart of a step for Markdown")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="print every number as JSON")] = False,
    live: Annotated[bool, typer.Option("--live", help="follow a run that goes on")] = False,
    steps: Annotated[str | None, typer.Option(metavar="A:B", help="show these steps span by span")] = None,
) -> None:
    """Say what limited a run, and show where its time and memory went. With two runs, compare them."""
    console, run = Console(), run_folder(folder)
    span = step_range(steps)
    place = Path(to) if to else run
    forms = {"--html": html, "--trace": trace, "--openmetrics": openmetrics, "--tensorboard": tensorboard}
    forms |= {"--mermaid": mermaid, "--json": as_json, "--live": live, "--steps": steps is not None}
    _refuse_together([name for name, wanted in forms.items() if wanted], other)
    if live:
        write = partial(report_files, run, place, ["openmetrics"], None)
        follow(run, console, beside=write if openmetrics else None)
    elif other is not None:
        compared = compare(run, other)
        if as_json:
            print(json.dumps(comparison_dict(compared), indent=2))
        else:
            console.print(run_comparison_text(compared, None), soft_wrap=True)
    else:
        asked = {"html": html, "trace": trace, "openmetrics": openmetrics, "tensorboard": tensorboard}
        kinds = [kind for kind, wanted in asked.items() if wanted]
        found, written = report_files(run, place, kinds, span)
        if as_json:
            print(json.dumps(report_dict(found), indent=2))
        elif mermaid:
            print(mermaid_gantt(found))
        elif not written:
            console.print(report_text(found))
        for path in written:
            print(f"written     {path}", file=sys.stderr if as_json or mermaid else sys.stdout)


def _refuse_together(forms: list[str], other: str | None) -> None:
    """What cannot be had at once is said, not left out."""
    if other is not None and set(forms) - {"--json"}:
        raise UsageError(f"RUN2 and {', '.join(forms)}: two runs are compared as text or with --json alone.")
    if "--live" in forms and set(forms) - {"--live", "--openmetrics"}:
        raise UsageError(f"{', '.join(forms)}: --live goes with --openmetrics alone.")
    if {"--mermaid", "--json"} <= set(forms):
        raise UsageError("--mermaid and --json both print: choose one.")
