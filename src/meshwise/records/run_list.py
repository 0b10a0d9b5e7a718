"""List the runs of a folder: status, metrics, plan, size.

Folders that are no runs are left out.
"""

from __future__ import annotations

import contextlib
import glob
import json
import re
import shlex
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from meshwise.records import folder as names
from meshwise.records.attempts import Attempt, attempts_of
from meshwise.records.checkpoints import size_of
from meshwise.records.metrics import Best, Metrics, read_best
from meshwise.spec.errors import UsageError, nearest
from meshwise.spec.plan_file import plan_from_toml

LOWER_IS_BETTER = ("loss", "error", "nats", "perplexity", "mae", "mse", "bits")
"""Words in the names of metrics for which lower is better."""
UNREADABLE = "unreadable"
SCRIPT, MANIFEST = "submit.sh", "submit.yaml"


@dataclass(frozen=True)
class RunEntry:
    """A short description of a run.

    job: the name of a job, or a script.
    args: the arguments of the job, such as `lr=3e-4`, or of the script.
    plan: the non-default fields of the plan, or "" without a plan.
    status: running, finished, stopped, failed, queued or unreadable.
    metric: the name of the metric that represents the run (see `Metrics`), or "" if the run has no metrics.
    last, best: the last and the best value of this metric.
    seconds: how long the workers have run, over all attempts.
    size: the size of the folder in bytes.
    attempts: all starts of the workers.
    """

    folder: Path
    job: str
    args: str
    plan: str
    status: str
    started: str
    metric: str
    last: float | None
    best: float | None
    seconds: float | None
    size: int
    attempts: list[Attempt] = field(default_factory=list)
    scheduler_job: str = ""
    """The number of the run's newest job in a cluster's queue, or "" if it was not submitted."""
    partition: str = ""
    queue: str = ""
    """The job's state in the scheduler's queue `partition`, such as `pending (Priority)`."""

    @property
    def name(self) -> str:
        return self.folder.name


def run_list(parent: Path) -> list[RunEntry]:
    """Return descriptions of the runs in `parent`, the oldest first. Folders that are not runs are left out.

    A run that has not begun is sorted by the time of its submission. A run with a damaged record has the status
    `unreadable`.
    """
    folders = [path.parent for path in parent.glob(f"*/{names.RUN}")] if parent.is_dir() else []
    return [run_entry(folder) for folder in sorted(folders, key=lambda folder: (names.since(folder), folder.name))]


def run_entry(folder: Path) -> RunEntry:
    """Return the description of the run in `folder`."""
    try:
        facts = names.read_run(folder)
    except UsageError:
        facts = {"status": UNREADABLE}
    metrics, known = Metrics(folder).read_on().by_name(), best_of(folder)
    metric, values = next(iter(metrics.items()), ("", []))
    if known is not None:
        metric, values = known.metric, metrics.get(known.metric, [])
    best = min if any(word in metric for word in LOWER_IS_BETTER) else max
    return RunEntry(
        folder,
        job=_text(facts.get("job")),
        args=args_of(facts),
        plan=plan_of(folder),
        status=_text(facts.get("status")) or UNREADABLE,
        started=_text(facts.get("started")),
        metric=metric,
        last=values[-1] if values else None,
        best=known.value if known is not None else best(values) if values else None,
        seconds=_seconds(facts.get("sessions")),
        attempts=attempts_of(facts),
        scheduler_job=next(iter(jobs_of(facts)[-1:]), ""),
        size=size_of(folder),
    )


def find_run(parent: Path, word: str) -> Path:
    """Return the folder of the run that `word` names. Raises UsageError if there is none, or if several runs match.

    word: the path of a run, its name in `parent`, or a part of exactly one name.
    """
    if not word:
        raise UsageError("the name of a run is empty. Name one of those that `meshwise runs` lists.")
    for folder in (parent / word, Path(word)):
        if (folder / names.RUN).exists():
            return folder
    known = [path.parent.name for path in parent.glob(f"*/{names.RUN}")]
    found = [name for name in known if word in name]
    if len(found) == 1:
        return parent / found[0]
    if found:
        raise UsageError(f"{word} is part of the names of {len(found)} runs, such as {found[0]}. Write a longer part.")
    raise UsageError(f"there is no run {word} in {parent}/.{nearest(word, known)} `meshwise runs` lists the runs.")


def best_of(folder: Path) -> Best | None:
    """Return the best evaluation of a run, or None if there is none or it cannot be read."""
    with contextlib.suppress(UsageError):
        return read_best(folder)
    return None


def args_of(facts: Mapping[str, Any]) -> str:
    """Return the arguments of a job's function or of a script as one text. facts: the run's record."""
    request = facts.get("request")
    given = request.get("args") if isinstance(request, dict) else facts.get("arguments")
    return shlex.join(map(str, given)) if isinstance(given, list) else ""


def plan_of(folder: Path) -> str:
    """Return the non-default fields of the plan in a run folder, such as `data=2, precision=bf16`.

    The text is empty without a plan.
    """
    try:
        text = (folder / names.PLAN).read_text(encoding="utf-8") if (folder / names.PLAN).is_file() else ""
        plan = plan_from_toml(text) if text else None
    except (OSError, ValueError, RecursionError, UsageError):
        return ""
    return str(plan or "").removeprefix("Plan(").removesuffix(")")


def fields_of(plan: str) -> dict[str, str]:
    """Parse the text that `plan_of` returns into fields by name."""
    return dict(re.findall(r"(\w+)=((?:\([^)]*\)|'[^']*'|[^,'(])+)", plan))


def jobs_of(facts: Mapping[str, Any]) -> list[str]:
    """Return the numbers of the scheduler's jobs that belong to a run, the newest last.

    A run has one job for each time that it was submitted. For a task of an array, or a run that a user's own batch
    script started, only the job of the last attempt is returned.

    facts: the run's record.
    """
    submission = facts.get("submission")
    jobs = submission.get("jobs") if isinstance(submission, dict) else None
    if isinstance(jobs, dict):
        return list(jobs)
    sessions = [one for one in facts.get("sessions") or () if isinstance(one, dict) and one.get("launcher") == "Slurm"]
    return [str(one["scheduler_job"]) for one in sessions[-1:] if one.get("scheduler_job")]


def array_of(folder: Path) -> tuple[Path, str]:
    """Split the folder of a task of a job array, such as `gpt-3`, into the folder that was submitted, `gpt`, and the
    number of the task, "3". For any other run, return `folder` and ""."""
    name, _, task = folder.name.rpartition("-")
    sent = folder.with_name(name or task)
    return (sent, task) if task.isdigit() and name and (sent / SCRIPT).is_file() else (folder, "")


def tasks_of(folder: Path) -> list[Path]:
    """Return the run folders of an array of tasks, such as `gpt-1` and `gpt-2` for the submitted folder `gpt`. A task
    that has not begun has no run folder yet."""
    found = [path.parent for path in folder.parent.glob(f"{glob.escape(folder.name)}-*/{names.RUN}")]
    return [path for path in found if array_of(path)[0] == folder]


def _seconds(sessions: Any) -> float | None:
    """Return the total seconds of all attempts, or None if this is unknown. A running attempt counts until now."""
    spans = [s for s in sessions if isinstance(s, dict)] if isinstance(sessions, list) else []
    ends = [(s.get("began"), s.get("ended") or (time.time() if s.get("status") == "running" else None)) for s in spans]
    found = [end - began for began, end in ends if isinstance(began, int | float) and isinstance(end, int | float)]
    return sum(found) if found else None


def _text(value: Any) -> str:
    return value if isinstance(value, str) else "" if value is None else json.dumps(value)
