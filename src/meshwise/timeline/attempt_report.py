"""Report the attempts of a run: where, when, and how each ended.

What happened before an attempt, such as queueing, is reported too.

Tested in tests/timeline/test_attempt_report.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise
from typing import Annotated, Any

from meshwise.records.attempts import Attempt, attempt_text, attempts_of
from meshwise.spec.units import count_text, seconds_text

Count = Annotated[int, count_text]
Seconds = Annotated[float, seconds_text]


@dataclass(frozen=True)
class AttemptReport:
    """One attempt of a run. Each start of the run's workers is an attempt.

    began: the local time.
    launched: what started the attempt, such as `Slurm job 7, start 2`.
    devices: the number of devices, or 0 if unknown.
    before: the seconds since the previous attempt ended, or since the run was submitted.
    queued: whether these seconds were spent in a scheduler's queue.
    seconds: the duration of the attempt.
    from_step: the step at which the attempt started, or None if unknown, as in a user's own training loop.
    steps_lost: the number of steps of the previous attempt that this attempt repeated, or None if `from_step` is None.
    """

    number: Count
    began: str
    launched: str
    devices: Count
    before: Seconds
    queued: bool
    seconds: Seconds
    from_step: Count | None
    steps_lost: Count | None
    status: str
    ended: str


def attempt_reports(facts: Mapping[str, Any]) -> list[AttemptReport]:
    """Report all attempts in the record of a run."""
    found = attempts_of(facts)
    gaps = [
        *[None][: len(found)],
        *((later.began or 0.0) - (one.ended or later.began or 0.0) for one, later in pairwise(found)),
    ]
    return [_report(one, gap) for one, gap in zip(found, gaps, strict=True)]


def _report(one: Attempt, gap: float | None) -> AttemptReport:
    began = one.began or 0.0
    return AttemptReport(
        number=one.number,
        began=f"{datetime.fromtimestamp(began):%Y-%m-%d %H:%M:%S}",
        launched=one.launched,
        devices=one.devices or 0,
        before=max(0.0, one.waited if one.waited is not None else gap or 0.0),
        queued=one.waited is not None,
        seconds=max(0.0, (one.ended or began) - began),
        from_step=one.from_step,
        steps_lost=None if one.from_step is None else one.steps_lost or 0,
        status=one.status,
        ended=attempt_text(one),
    )
