"""Break a simulated step's time down by rank, kind and phase.

Every moment is counted once, under the first of these kinds that applies: computing, communication that does not
overlap with computing, copies to and from the host, waiting for other ranks. A gap counts as waiting for the host if it
ends with an operator that the host launched too late. Any other gap is idle time.

Tested in tests/rehearsal/test_simulate.py.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from meshwise.rehearsal.period import within_period
from meshwise.rehearsal.play import Done
from meshwise.rehearsal.simulate import Step
from meshwise.rehearsal.work import CollectiveOperation, Copy, Operation

KINDS = ("computing", "communication", "copies", "waiting", "launches", "idle")
"""The kinds of time of a rank: running an operator, communication that does not overlap, copies to or from the host,
waiting for other ranks (such as a pipeline's bubble), waiting for the host to launch, and anything else."""


@dataclass(frozen=True)
class RankStep:
    """The time of one rank in a simulated step, from the step's start until all ranks have ended. Times are in seconds.

    kinds: the time by kind, one of KINDS.
    phases: the time by (phase, kind).
    hidden: the time of communication that overlaps with computing. It is not part of any kind.
    operators: the time by operator name.
    """

    rank: int
    seconds: float
    kinds: Mapping[str, float]
    phases: Mapping[tuple[str, str], float]
    hidden: float
    operators: Mapping[str, float]


def breakdown(step: Step, rank: int) -> RankStep:
    """Return how a simulated rank spends the time of the step: how many seconds of each kind (see KINDS) in each
    phase."""
    done = step.done[rank]
    found = _breakdown(done, step.seconds - len(step.left_out) * step.period, rank)
    if not step.left_out:
        return found
    each = _breakdown(within_period(done, step.left_out, step.period), step.period, rank)

    def both(one: Mapping[Any, float], other: Mapping[Any, float]) -> dict[Any, float]:
        return {key: one.get(key, 0.0) + len(step.left_out) * other.get(key, 0.0) for key in {**one, **other}}

    return RankStep(
        rank,
        step.seconds,
        both(found.kinds, each.kinds),
        both(found.phases, each.phases),
        found.hidden + len(step.left_out) * each.hidden,
        both(found.operators, each.operators),
    )


def _breakdown(done: tuple[Done, ...], seconds: float, rank: int) -> RankStep:
    """The same for launches of which none are left out."""
    edges = _edges(done)
    begun = sorted(done, key=lambda one: one.start)
    active: list[list[str]] = [[] for _ in KINDS[:4]]
    phases: dict[tuple[str, str], float] = defaultdict(float)
    hidden, last, following = 0.0, 0.0, 0
    for time, began, kind, phase in [*edges, (seconds, False, -1, "")]:
        if time > last:
            while following < len(begun) and begun[following].start < time:
                following += 1
            owner = next((kind for kind, own in enumerate(active) if own), -1)
            if owner >= 0:
                phases[active[owner][-1], KINDS[owner]] += time - last
                hidden += time - last if owner == 0 and active[1] else 0.0
            else:
                late = following < len(begun) and begun[following].by_host and kind >= 0
                phases[phase if late else "other", "launches" if late else "idle"] += time - last
            last = time
        if kind >= 0:
            active[kind].append(phase) if began else active[kind].remove(phase)
    kinds = {kind: sum(seconds for (_, of), seconds in phases.items() if of == kind) for kind in KINDS}
    operators: dict[str, float] = defaultdict(float)
    for one in done:
        if isinstance(one.launch.what, Operation):
            operators[one.launch.what.name] += one.end - one.start
    return RankStep(rank, seconds, kinds, dict(phases), hidden, dict(operators))


def slowest_rank(step: Step) -> RankStep:
    """Return the `RankStep` of the rank that spends the most time on computing."""

    def computing(done: Sequence[Done]) -> float:
        seconds = last = 0.0
        for one in done:
            if isinstance(one.launch.what, Operation) and one.end > last:
                seconds, last = seconds + one.end - max(one.start, last), one.end
        return seconds

    def whole(rank: int) -> float:
        done, count = step.done[rank], len(step.left_out)
        each = computing(within_period(done, step.left_out, step.period)) if count else 0.0
        return computing(done) + count * each

    return breakdown(step, max(step.ranks, key=whole))


def _edges(done: tuple[Done, ...]) -> list[tuple[float, bool, int, str]]:
    """Return two entries for each activity, one for its beginning and one for its end, sorted by time."""
    edges: list[tuple[float, bool, int, str]] = []
    for one in done:
        what = one.launch.what
        kind = 1 if isinstance(what, CollectiveOperation) else 2 if isinstance(what, Copy) else 0
        for begin, end, which in ((one.start, one.end, kind), (one.ready, one.start, 3)):
            if end > begin:
                edges.append((begin, True, which, one.launch.phase))
                edges.append((end, False, which, one.launch.phase))
    return sorted(edges)
