"""Runs whose every moment is known: schedules of phases, played out with collectives that wait for all ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from meshwise.reports.spans import KIND, LANE, SPAN, Clock, Rank, RunSession, Timeline

MS = 1_000_000
PHASES = ("data", "forward", "backward", "optimizer")
Works = Callable[[int, int], dict[str, float]]
"""`works(step, rank)`: milliseconds of each phase."""


@dataclass(frozen=True)
class Schedule:
    """buckets: the parts of the backward after which a bucket is handed over. transmit: ms that one takes from when all
    ranks have come and the one before it is through. gap: ms between phases. tails: ms by which a rank leaves each
    collective later than the others, as one with a slower link does."""

    ranks: int = 3
    steps: int = 40
    buckets: tuple[float, ...] = (0.5, 1.0)
    transmit: float = 2.0
    gap: float = 0.0
    tails: tuple[float, ...] = ()


def played(schedule: Schedule, works: Works) -> Timeline:
    """The timeline of a run: step k's phases, its collectives numbered from 2k on."""
    rows: list[tuple[int, ...]] = []
    now = [0.0] * schedule.ranks
    for step in range(1, schedule.steps + 1):
        begun, arrivals = [0.0] * schedule.ranks, []
        work = [works(step, rank) for rank in range(schedule.ranks)]
        for rank in range(schedule.ranks):
            for phase in ("data", "forward"):
                now[rank] += schedule.gap
                rows.append(_row(rank, phase, step, now[rank], now[rank] + work[rank][phase]))
                now[rank] += work[rank][phase]
            begun[rank] = now[rank]
            arrivals.append([now[rank] + part * work[rank]["backward"] for part in schedule.buckets])
        through = -np.inf
        for bucket in range(len(schedule.buckets)):
            came = [arrivals[rank][bucket] for rank in range(schedule.ranks)]
            through = max(*came, through) + schedule.transmit
            number = (step - 1) * len(schedule.buckets) + bucket
            for rank in range(schedule.ranks):
                rows.append(_row(rank, "communication", step, came[rank], through + _tail(schedule, rank), number))
        for rank in range(schedule.ranks):
            now[rank] = max(through + _tail(schedule, rank), begun[rank] + work[rank]["backward"])
            rows.append(_row(rank, "backward", step, begun[rank], now[rank]))
            rows.append(_row(rank, "optimizer", step, now[rank], now[rank] + work[rank]["optimizer"]))
            now[rank] += work[rank]["optimizer"]
    return timeline_of(rows, schedule.ranks)


def _tail(schedule: Schedule, rank: int) -> float:
    return schedule.tails[rank] if rank < len(schedule.tails) else 0.0


def _row(rank: int, kind: str, step: int, start: float, end: float, collective: int = -1) -> tuple[int, ...]:
    lane = LANE["communication" if kind == "communication" else "main"]
    name = 1 if kind == "communication" else 0
    return (rank, KIND[kind], lane, name, step, round(start * MS), round(end * MS), 4096 * name, collective)


def timeline_of(rows: Sequence[tuple[int, ...]], ranks: int) -> Timeline:
    """A timeline of rows in SPAN's order, of one session that begins at 0 and ends with its last span."""
    spans = np.array(list(rows), SPAN)
    spans = spans[np.lexsort((-spans["end"], spans["start"], spans["rank"]))]
    last = int(spans["end"].max(initial=0))
    return Timeline(
        spans,
        ("", "all-reduce"),
        ranks=tuple(Rank(rank, "cpu", "here", last, True) for rank in range(ranks)),
        clocks=tuple(Clock(rank) for rank in range(ranks)),
        sessions=(RunSession(0, last, "finished"),),
        facts={"job": "schedule", "status": "finished"},
    )


def even(data: float = 2, forward: float = 10, backward: float = 20, optimizer: float = 3) -> Works:
    """Every rank takes the same, every step."""
    return lambda step, rank: {"data": data, "forward": forward, "backward": backward, "optimizer": optimizer}


def jittered(works: Works, seed: int, spread: float = 0.05) -> Works:
    """Each phase of each step and rank longer or shorter by chance: log-normal, about `spread`."""

    def work(step: int, rank: int) -> dict[str, float]:
        chance = np.random.default_rng((seed, step, rank)).normal(0, spread, len(PHASES))
        return {phase: ms * float(np.exp(c)) for (phase, ms), c in zip(works(step, rank).items(), chance, strict=True)}

    return work


def delayed(works: Works, rank: int, phase: str, ms: float) -> Works:
    """One rank takes `ms` more in one phase."""

    def work(step: int, at: int) -> dict[str, float]:
        found = works(step, at)
        return found | {phase: found[phase] + ms} if at == rank else found

    return work


def shifted(timeline: Timeline, rank: int, ns: int) -> Timeline:
    """The same run, with the clock of one rank off by `ns`."""
    spans = timeline.spans.copy()
    mine = spans["rank"] == rank
    spans["start"][mine] += ns
    spans["end"][mine] += ns
    return replace(timeline, spans=spans)
