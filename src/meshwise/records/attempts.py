"""List a run's attempts: the start, end, cost and logs of each.

An attempt is one start of the run's workers. Attempts are read from run.json. Each rank has a log file of its own in
each attempt, so what a cut-off process of an earlier attempt prints is not taken for output of a later attempt.
"""

from __future__ import annotations

import re
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from meshwise.records.files import make_folder
from meshwise.spec.units import plural, seconds_text

WORKERS = "workers"
BEGINS = re.compile(r"--- begins on (?P<host>\S+) at (?P<time>\d+(\.\d+)?)")
"""Matches the first line of an attempt's log, which has the launcher's host and the time in seconds since 1970."""
_NUMBERS: Mapping[str, type[int] | type[float]] = {
    **dict.fromkeys(("step", "from_step", "steps_lost"), int),
    **dict.fromkeys(("seconds_to_detect", "seconds_to_step", "began", "ended"), float),
}
"""The numbers of an attempt, as run.json has them."""
_RANK = re.compile(r"rank(\d+)(?:\.(\d+))?\.log")


@dataclass(frozen=True)
class Attempt:
    """One start of a run's workers. A field is None if its value is unknown.

    reason: why the attempt ended, or "" if it finished.
    step: the step at which the attempt failed, on the rank that caused the failure.
    seconds_to_detect: the time from an injected fault to the launcher's report of the failure.
    from_step: the last step that was finished before the attempt began.
    steps_lost: the number of steps that this attempt had to repeat.
    seconds_to_step: the time from the report of the previous failure to the first step that this attempt finished.
    told: messages for the user about this attempt.
    """

    number: int
    status: str
    reason: str
    step: int | None
    seconds_to_detect: float | None
    from_step: int | None
    steps_lost: int | None
    seconds_to_step: float | None
    began: float | None = None
    ended: float | None = None
    launched: str = ""
    devices: int | None = None
    waited: float | None = None
    told: tuple[str, ...] = ()


def attempts_of(facts: Mapping[str, Any]) -> list[Attempt]:
    """Return the attempts of a run. facts: the run's record, the contents of run.json."""
    sessions = facts.get("sessions")
    found = [s for s in sessions if isinstance(s, dict)] if isinstance(sessions, list) else []
    return [
        Attempt(
            number,
            str(session.get("status", "")),
            str(session.get("reason", "")),
            **{name: _number(session.get(name), kind) for name, kind in _NUMBERS.items()},
            launched=_launched(session),
            devices=_number(session.get("world"), int),
            waited=_waited(facts, before, session),
            told=_texts(session.get("told")),
        )
        for number, (before, session) in enumerate(zip([{}, *found], found, strict=False), 1)
    ]


def _launched(session: Mapping[str, Any]) -> str:
    if not session.get("scheduler_job"):
        return ""
    return f"{session.get('launcher')} job {session['scheduler_job']}, start {session.get('start')}"


def _waited(facts: Mapping[str, Any], before: Mapping[str, Any], session: Mapping[str, Any]) -> float | None:
    """Return how many seconds this attempt's job waited in the scheduler's queue. None if unknown, or if it did
    not wait."""
    start, submission = (session.get("scheduler_job"), session.get("start")), facts.get("submission")
    if not start[0] or start == (before.get("scheduler_job"), before.get("start")):
        return None
    jobs = submission.get("jobs") if isinstance(submission, Mapping) else None
    sent = _number(jobs.get(start[0]), float) if isinstance(jobs, Mapping) else None
    same = before.get("scheduler_job") == start[0]
    since, began = _number(before.get("ended"), float) if same else sent, _number(session.get("began"), float)
    return None if since is None or began is None else max(0.0, began - since)


def attempt_text(one: Attempt) -> str:
    """Describe how an attempt ended.

    For example `failed: rank 1 was killed by SIGKILL`, or `stopped by SIGTERM after step 40`.
    """
    between = " by " if one.status == "stopped" else ": "
    return f"{one.status}{between}{one.reason}" if one.reason else one.status


def lost_texts(facts: Mapping[str, Any]) -> list[str]:
    """Return the messages of all attempts. For each failed attempt, a text also says why it failed and how much time
    and how many steps were lost."""
    attempts, found = attempts_of(facts), list[str]()
    for one, after in zip(attempts, [*attempts[1:], None], strict=False):
        found += one.told
        if one.reason and one.status == "failed":
            found.append(_lost(one, after))
    return found


def _lost(one: Attempt, after: Attempt | None) -> str:
    reason = one.reason.partition(". ")[0]
    where = "" if one.step is None or "in step" in reason else f" (step {one.step})"
    noticed = "" if one.seconds_to_detect is None else f", noticed after {seconds_text(one.seconds_to_detect)}"
    costs = []
    if after is not None and after.steps_lost is not None:
        costs.append(f"{plural(after.steps_lost, 'step')} {'was' if after.steps_lost == 1 else 'were'} done again")
    if after is not None and after.seconds_to_step is not None:
        costs.append(f"the next step came {seconds_text(after.seconds_to_step)} later")
    return f"Attempt {one.number}: {reason}{where}{noticed}{'; ' if costs else ''}{', '.join(costs)}."


def _texts(value: Any) -> tuple[str, ...]:
    return tuple(text for text in value if isinstance(text, str)) if isinstance(value, list) else ()


def _number(value: Any, kind: type[int] | type[float]) -> Any:
    """Return a recorded number between 0 and 1e15 as `kind`. Returns None for anything else."""
    if isinstance(value, bool) or not isinstance(value, (int, kind)) or not 0 <= value < 1e15:
        return None
    return kind(value)


def open_log(folder: Path, rank: int, attempt: int = 1) -> BinaryIO:
    """Open the log of a rank for one attempt of a run, for appending."""
    path = folder / WORKERS / (f"rank{rank}.log" if attempt == 1 else f"rank{rank}.{attempt}.log")
    make_folder(path.parent)
    log = path.open("ab")
    log.write(f"--- begins on {socket.gethostname()} at {time.time():.1f}\n".encode())
    log.flush()
    return log


def logs_of(folder: Path) -> list[tuple[int, int, Path]]:
    """Return (rank, attempt, path) for each log in a run folder."""
    named = [(_RANK.fullmatch(path.name), path) for path in (folder / WORKERS).glob("*")]
    return sorted((int(match[1]), int(match[2] or 1), path) for match, path in named if match)
