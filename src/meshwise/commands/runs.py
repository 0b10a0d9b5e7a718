"""List the runs that there are: `meshwise runs`.

Tested in tests/cli/test_runs.py.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from meshwise import api, timeline
from meshwise.commands.completion import runs_here
from meshwise.spec.errors import UsageError

FOLDER = typer.Option("--in", metavar="DIR", help="the folder in which the runs lie")
NAME = typer.Argument(metavar="NAME", help="a run's name, a part of it, or its folder", autocompletion=runs_here)
app = typer.Typer(name="runs", add_completion=False)


@app.callback(invoke_without_command=True)
def runs(
    context: typer.Context,
    folder: Annotated[str, FOLDER] = "runs",
    status: Annotated[str | None, typer.Option(help="only queued, running, finished, stopped or failed ones")] = None,
    name: Annotated[str | None, typer.Option(help="only those with this in their name")] = None,
    job: Annotated[str | None, typer.Option(help="only those with this in their job or script")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print them as JSON")] = False,
) -> None:
    """List the runs of a folder: job, plan, status, metric, time, size. Remove a run, or open its page.

    \b
    meshwise runs                              list all runs in runs/
    meshwise runs --status failed --job mnist  list failed runs of a job
    meshwise runs remove 20261121-105309       remove the run of this name
    meshwise runs open mnist-cnn               show the page of a run
    """
    context.obj = Path(folder)
    if context.invoked_subcommand is not None:
        if status or name or job or as_json:
            raise UsageError(f"meshwise runs {context.invoked_subcommand} takes only names. Remove the other options.")
        return
    found = api.runs.runs(Path(folder), status=status, name=name, job=job)
    if as_json:
        print(json.dumps([asdict(entry) | {"folder": str(entry.folder)} for entry in found], indent=2))
    else:
        Console().print(timeline.views.run_list_text.run_list_text(found, Path(folder)), soft_wrap=True)


@app.command()
def remove(
    context: typer.Context,
    words: Annotated[list[str], NAME],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="do not ask")] = False,
    force: Annotated[bool, typer.Option("--force", help="also a run that is marked as running")] = False,
) -> None:
    """Remove runs with all that is in their folders."""
    found = api.runs.to_remove(context.obj, words, running=force)
    for entry in found:
        print(f"{entry.folder}  {entry.job}  {entry.status}")
    if not yes and not _agreed(len(found)):
        raise typer.Exit(1)
    for entry in found:
        api.runs.remove(entry)
        print(f"removed     {entry.folder}")


@app.command("open")
def open_page(
    context: typer.Context,
    word: Annotated[str, NAME],
    browser: Annotated[bool, typer.Option(help="show it in a browser")] = True,
) -> None:
    """Write a run's page (report.html), and show it in a browser."""
    page, shown = api.runs.open_page(context.obj, word, browser=browser)
    print(f"{'opened' if shown else 'written':<10}  {page}")


def _agreed(count: int) -> bool:
    """Ask the user whether to remove this many runs. Raises UsageError if stdin is not a terminal."""
    if not sys.stdin.isatty():
        raise UsageError("stdin is not a terminal, so nobody can confirm. Use meshwise runs remove --yes NAME.")
    return input(f"Remove {count} run{'s' * (count > 1)}? [y/N] ").strip().lower() in ("y", "yes")
