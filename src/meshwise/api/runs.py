"""List runs of a folder, remove them, and open their pages.

This file imports no torch. Tested in tests/cli/test_runs.py.
"""

from __future__ import annotations

import shutil
import webbrowser
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from meshwise.api.report import report_views
from meshwise.records.run_list import RunEntry, find_run, run_entry, run_list
from meshwise.schedulers import slurm
from meshwise.spec.errors import UsageError, nearest

STATUSES = ("queued", "running", "finished", "stopped", "failed", "unreadable")


def runs(parent: Path, *, status: str | None = None, name: str | None = None, job: str | None = None) -> list[RunEntry]:
    """List the runs in `parent`, oldest first.

    status: only runs with this status.
    name, job: only runs that have these words in their name or job.

    Raises UsageError for a status that no run can have.
    """
    if status is not None and status not in STATUSES:
        raise UsageError(f"--status {status} must be one of {', '.join(STATUSES)}.{nearest(status, STATUSES)}")
    return [
        entry
        for entry in with_queue(run_list(parent))
        if status in (None, entry.status) and (name or "") in entry.name and (job or "") in entry.job
    ]


def with_queue(entries: Sequence[RunEntry]) -> list[RunEntry]:
    """Ask the cluster's queue for the state of the runs that were submitted to it. Return all entries, with these
    states filled in."""
    jobs = [entry.scheduler_job for entry in entries if entry.scheduler_job]
    known = slurm.queue(jobs)
    return [_with_queue(entry, known) for entry in entries]


def _with_queue(entry: RunEntry, known: Mapping[str, slurm.Queued]) -> RunEntry:
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


def to_remove(parent: Path, words: Sequence[str], *, running: bool) -> list[RunEntry]:
    """Return the runs that `words` name. Raises UsageError for a run in the queue, and for a symbolic link to a run
    folder. A run that is running also raises UsageError, unless `running` is set."""
    found = with_queue([run_entry(find_run(parent, word)) for word in words])
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


def remove(entry: RunEntry) -> None:
    """Remove a run's folder with its contents. Raises UsageError if the system does not allow it."""
    try:
        shutil.rmtree(entry.folder)
    except OSError as error:
        raise UsageError(
            f"{entry.folder} cannot be removed completely ({error.strerror}). Remove what is left of it by hand."
        ) from None


def open_page(parent: Path, word: str, *, browser: bool) -> tuple[Path, bool]:
    """Write a run's page. Return its path, and whether a browser opened it.

    browser: whether to open the page in a browser.
    """
    folder = find_run(parent, word)
    _, _, (page,) = report_views(folder, ["html"], folder)
    return page, browser and webbrowser.open(page.resolve().as_uri())
