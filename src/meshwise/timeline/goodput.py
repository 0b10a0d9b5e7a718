"""Compute goodput: what a run's wall time went into.

The parts are means over the run's devices, and add up to the wall time:
useful       forward, backward and optimizer of steps that count
evaluation   evaluating
saving       writing checkpoints
waiting      for data, transfers, exposed communication, stragglers, and between phases
starting     from the command to the first step of each session, and from the last span to the session's end
queued       in a scheduler's queue, before each start of its job
lost         steps that were repeated after a stop, and the time after a failed session's last span

Tested in tests/timeline/test_span_log.py.
"""

from __future__ import annotations

from meshwise.records.attempts import attempts_of
from meshwise.timeline.attribution import OUTSIDE, session_of
from meshwise.timeline.run_report import COMPUTING, GoodputPart
from meshwise.timeline.spans import KIND
from meshwise.timeline.step_table import StepTable
from meshwise.timeline.timeline import Timeline

USEFUL = [KIND[kind] for kind in COMPUTING]
WAITING = {
    "data": KIND["data"],
    "transfer": KIND["transfer"],
    "communication": KIND["communication"],
    "stragglers": KIND["waiting"],
    "between phases": KIND["idle"],
}


def goodput_of(timeline: Timeline, table: StepTable) -> tuple[float, list[GoodputPart], list[GoodputPart]]:
    """Return the wall time of a run in seconds, the parts of the wall time, and the parts of the time spent waiting."""
    alive = sum(session.ended - session.began for session in timeline.sessions) / 1e9
    queued = sum(attempt.waited or 0.0 for attempt in attempts_of(timeline.facts))
    wall = alive + queued
    counted = table.seconds[table.counted][:, :, :OUTSIDE].sum(axis=0)  # (ranks, kinds)
    ranks = max(len(table.ranks), 1)
    of_kind = counted.sum(axis=0) / ranks
    waiting = {name: float(of_kind[code]) for name, code in WAITING.items()}
    starting, lost = _around(timeline, table, alive)
    seconds = {
        "useful": float(of_kind[USEFUL].sum()),
        "evaluation": float(of_kind[KIND["evaluate"]]),
        "saving": float(of_kind[KIND["checkpoint"]]),
        "waiting": sum(waiting.values()),
        "starting": starting,
        "lost": lost,
    } | ({"queued": queued} if queued else {})
    if table.arrivals.of_stages:
        waiting = {"other stages" if name == "stragglers" else name: value for name, value in waiting.items()}
    return wall, _parts(seconds, wall), _parts(waiting, wall)


def _parts(seconds: dict[str, float], wall: float) -> list[GoodputPart]:
    return [GoodputPart(name, value, value / wall if wall else 0.0) for name, value in seconds.items()]


def _around(timeline: Timeline, table: StepTable, wall: float) -> tuple[float, float]:
    """Return the seconds of two parts of the wall time, (starting, lost), each as the mean over the ranks.

    Starting is the time before and after the steps. Lost is the time of steps that were repeated in a later session,
    and the time after the last span of a failed session.
    wall: the total seconds of all sessions. If no rank has recorded anything, all of this time counts as starting.
    """
    starting = float(table.seconds[(table.step == 0) & ~table.lost][:, :, :OUTSIDE].sum())
    lost = float(table.seconds[table.lost][:, :, :OUTSIDE].sum())
    if not len(table.ranks):
        return wall, 0.0
    for rank in table.ranks.tolist():
        spans = timeline.of_rank(rank)
        spans = spans[spans["end"] > spans["start"]]  # a span of no length bounds nothing
        session = session_of(spans["start"], timeline.sessions)
        for number, facts in enumerate(timeline.sessions):
            inside = spans[session == number]
            last = min(int(inside["end"].max()), facts.ended) if len(inside) else facts.ended
            starting += (int(inside["start"].min(initial=facts.ended)) - facts.began) / 1e9
            tail = (facts.ended - last) / 1e9
            if facts.status == "failed":
                lost += tail
            else:
                starting += tail
    return starting / len(table.ranks), lost / len(table.ranks)
