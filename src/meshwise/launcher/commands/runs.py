"""List runs, and remove some: `meshwise runs`."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from meshwise import reports
from meshwise.launcher.engines import kubectl, slurm
from meshwise.records.run_list import RunEntry, find_run, run_entry, run_list
from meshwise.spec.errors import UsageError
from meshwise.terminal.completion import runs_here

FOLDER = typer.Option("--in", metavar="DIR", help="the folder that holds the runs")
NAME = typer.Argument(metavar="NAME", help="a run's name, a part of it, or its folder", autocompletion=runs_here)
app = typer.Typer(name="runs", add_completion=False)


@app.callback(invoke_without_command=True)
def runs(
    context: typer.Context,
    folder: Annotated[str, FOLDER] = "runs",
    only: Annotated[
        list[str], typer.Option(metavar="WORD", help="only runs with WORD in name, job or status; may be repeated")
    ] = [],  # noqa: B006
    as_json: Annotated[bool, typer.Option("--json", help="print the runs as JSON")] = False,
) -> None:
    """List the runs of a folder: job, plan, status, metric, time, size. Or remove runs.

    \b
    meshwise runs                              list all runs in runs/
    meshwise runs --only failed --only mnist   list failed runs of a job
    meshwise runs remove 20261121-105309       remove the run of this name
    """
    context.obj = Path(folder)
    if context.invoked_subcommand is not None:
        if only or as_json:
            raise UsageError(f"meshwise runs {context.invoked_subcommand} takes only names. Remove the other options.")
        return
    found = [
        entry
        for entry in _with_queue(run_list(Path(folder)))
        if all(word in f"{entry.name}\n{entry.job}\n{entry.status}" for word in only)
    ]
    if as_json:
        print(json.dumps([asdict(entry) | {"folder": str(entry.folder)} for entry in found], indent=2))
    else:
        Console().print(reports.views.run_text.run_list_text(found, Path(folder)), soft_wrap=True)


@app.command()
def remove(
    context: typer.Context,
    words: Annotated[list[str], NAME],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="do not ask for confirmation")] = False,
    force: Annotated[bool, typer.Option("--force", help="also remove runs that are marked as running")] = False,
) -> None:
    """Remove runs with all that is in their folders."""
    found = _to_remove(context.obj, words, running=force)
    for entry in found:
        print(f"{entry.folder}  {entry.job}  {entry.status}")
    if not yes and not _agreed(len(found)):
        raise typer.Exit(1)
    for entry in found:
        try:
            shutil.rmtree(entry.folder)
        except OSError as error:
            raise UsageError(
                f"{entry.folder} cannot be removed completely ({error.strerror}). Remove what is left of it by hand."
            ) from None
        print(f"removed     {entry.folder}")


def _with_queue(entries: Sequence[RunEntry]) -> list[RunEntry]:
    """Return all entries. Runs that were submitted to a cluster get the state that the queue reports for them."""
    jobs = [entry.scheduler_job for entry in entries if entry.scheduler_job]
    loads = {job: kubectl.workload_of([job]) for job in jobs}
    states = kubectl.states(filter(None, loads.values()))
    known = slurm.queue(job for job in jobs if loads[job] is None)
    return [
        _on_cluster(entry, states.get(load)) if (load := loads.get(entry.scheduler_job)) else _in_queue(entry, known)
        for entry in entries
    ]


def _on_cluster(entry: RunEntry, state: kubectl.State | None) -> RunEntry:
    """Return the entry of a run on Kubernetes with what its cluster says. The run folder, which may lie where only pods
    see it, knows more of a run that is running or over."""
    if state is None or entry.status == "finished":
        return entry
    if state.status == kubectl.GONE:
        live = entry.status in ("queued", "running")
        return replace(entry, status="stopped", queue=state.why) if live else entry
    return replace(entry, status=state.status, queue=state.why)


def _in_queue(entry: RunEntry, known: Mapping[str, slurm.Queued]) -> RunEntry:
    job = known.get(entry.scheduler_job)
    if job is None:
        if not (entry.scheduler_job and entry.status == "queued" and slurm.answers()):
            return entry
        output = f"slurm-{entry.scheduler_job}.out"
        why = f"see its {output}" if (entry.folder / output).exists() else "left the queue before its start"
        return replace(entry, status="failed", queue=why)
    entry = replace(entry, partition=job.partition)
    if job.state == slurm.RUNNING:
        return entry if entry.status == "running" else replace(entry, queue="starting")
    why = f" ({job.reason})" if job.reason not in ("", "None") else ""
    return replace(entry, status="queued", queue=f"{job.state.lower()}{why}")


def _to_remove(parent: Path, words: Sequence[str], *, running: bool) -> list[RunEntry]:
    """Return the runs that `words` name. Raises UsageError for a run in the queue, and for a symbolic link to a run
    folder. A run that is running also raises UsageError, unless `running` is set."""
    found = _with_queue([run_entry(find_run(parent, word)) for word in words])
    entries = {entry.folder: entry for entry in found}
    for entry in entries.values():
        if entry.status == "queued" and entry.queue:
            raise UsageError(f"{entry.name} is in the queue, {entry.queue}. Stop it first: meshwise stop {entry.name}")
        if entry.status == "running" and not running:
            raise UsageError(
                f"run {entry.name} is still running. Use meshwise stop, or --force if its launcher was killed."
            )
        if entry.folder.is_symlink():
            raise UsageError(f"{entry.folder} is a symbolic link. Remove it by hand, and name the folder behind it.")
    return list(entries.values())


def _agreed(count: int) -> bool:
    """Ask the user whether to remove this many runs. Raises UsageError if stdin is not a terminal."""
    if not sys.stdin.isatty():
        raise UsageError("stdin is not a terminal, so nobody can confirm. Use meshwise runs remove --yes NAME.")
    return input(f"Remove {count} run{'s' * (count > 1)}? [y/N] ").strip().lower() in ("y", "yes")
