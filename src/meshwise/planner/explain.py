"""Explain a simulated step's time: kinds, launches, and its limit.

Every moment is counted once, under the first of these kinds that applies: computing, communication that does not
overlap with computing, copies to and from the host, waiting for other ranks. A gap counts as waiting for the host if it
ends with an operator that the host launched too late. Any other gap is idle time.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from meshwise.hardware.views.devices import kind_text
from meshwise.planner.estimate import Estimate
from meshwise.planner.event_loop import Done
from meshwise.planner.price import COMPUTE, MEASURED, MEMORY
from meshwise.planner.prices import Prices
from meshwise.planner.simulate import Step, within_period
from meshwise.planner.work import CollectiveOperation, Copy, Operation, What
from meshwise.spec.bandwidth import bus_bandwidth
from meshwise.spec.machine import DEVICE, Machine, link_between

KINDS = ("computing", "communication", "copies", "waiting", "launches", "idle")
"""The kinds of time of a rank: running an operator, communication that does not overlap, copies to or from the host,
waiting for other ranks (such as a pipeline's bubble), waiting for the host to launch, and anything else."""


@dataclass(frozen=True)
class RankStep:
    """The time of one rank in a simulated step, from the step's start until all ranks have ended. Times are in
    seconds."""

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
    """Like `breakdown`, for a step without left-out launches."""
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


LAUNCHES, WAITING, IDLE, TO_HOST = "launches", "waiting for other ranks", "idle", "link to the host"
MOST = 8
"""The maximum number of operators to list. The same limit applies to collectives."""


@dataclass(frozen=True)
class Costly:
    """A group of equal launches of one rank in a step."""

    what: str
    times: int
    seconds: float
    bytes: int
    rate: float
    limit: str
    origin: str


@dataclass(frozen=True)
class Explanation:
    """An explanation of where the time of one plan's step goes.

    time: the time of the rank that computes for the longest time.
    limits: what the step's seconds on this rank are due to, such as `compute`, `memory`, a link or waiting. The seconds
        of all causes add up to the step's time.
    operators, collectives: the most expensive launches, grouped.
    factors: for each cause of uncertainty, such as `compute`, how many seconds the step may take longer (see `Step`).
    runner_up: the estimate of the next best plan.
    """

    estimate: Estimate
    time: RankStep
    limits: Mapping[str, float]
    operators: tuple[Costly, ...]
    collectives: tuple[Costly, ...]
    factors: Mapping[str, float]
    runner_up: Estimate | None = None


def explain(estimate: Estimate, step: Step, prices: Prices, runner_up: Estimate | None = None) -> Explanation:
    """Return an explanation of where the time of a plan's simulated step goes."""
    time = slowest_rank(step)
    done = step.done[time.rank]
    operators = _costly([one for one in done if isinstance(one.launch.what, Operation)], time.rank, prices)
    collectives = _costly([one for one in done if isinstance(one.launch.what, CollectiveOperation)], time.rank, prices)
    limits = _limits(done, time, prices)
    return Explanation(estimate, time, limits, operators[:MOST], collectives[:MOST], step.factors, runner_up)


def link_words(machine: Machine, ranks: Sequence[int]) -> str:
    """Return the name of the slowest link among these ranks, such as `NVLink4 x18`, `network` or `a link that is not
    known`."""
    devices = [machine.devices[rank] for rank in ranks]
    if len({device.host for device in devices}) > 1:
        return "network"
    link = link_between(machine, devices[0].name, devices[-1].name) or link_between(machine, DEVICE, DEVICE)
    words = kind_text(link) if link is not None else ""
    return {"process": "processes of a host", "": "a link that is not known"}.get(words, words)


def _limits(done: Sequence[Done], time: RankStep, prices: Prices) -> dict[str, float]:
    """Divide the time of the rank's step among the causes that limit its speed, the largest first."""
    computing: dict[str, float] = defaultdict(float)
    links: dict[str, float] = defaultdict(float)
    for one in done:
        what, seconds = one.launch.what, one.end - one.start
        if isinstance(what, Operation):
            computing[_limit(what, time.rank, prices)] += seconds
        elif isinstance(what, CollectiveOperation) and what.kind != "receive":
            links[_limit(what, time.rank, prices)] += seconds
    kinds = time.kinds
    found = _divided(kinds["computing"], computing, COMPUTE) | _divided(kinds["communication"], links, "links")
    found |= {TO_HOST: kinds["copies"], WAITING: kinds["waiting"], LAUNCHES: kinds["launches"], IDLE: kinds["idle"]}
    return {name: seconds for name, seconds in sorted(found.items(), key=lambda one: -one[1]) if seconds > 0}


def _divided(seconds: float, over: Mapping[str, float], otherwise: str) -> dict[str, float]:
    whole = sum(over.values())
    return {name: seconds * part / whole for name, part in over.items()} if whole else {otherwise: seconds}


def _limit(what: What, rank: int, prices: Prices) -> str:
    if isinstance(what, CollectiveOperation):
        return link_words(prices.machine, what.ranks)
    price = prices.of(what, rank)
    return MEMORY if price is None else price.factor


def _costly(done: Sequence[Done], rank: int, prices: Prices) -> tuple[Costly, ...]:
    """Return groups of equal launches (same operator and shapes, or same collective), the most expensive first."""
    seconds: dict[What, float] = defaultdict(float)
    times = Counter(one.launch.what for one in done)
    for one in done:
        seconds[one.launch.what] += one.end - one.start
    return tuple(
        _costly_of(what, times[what], seconds[what], rank, prices)
        for what in sorted(seconds, key=lambda one: -seconds[one])
    )


def _costly_of(what: What, times: int, seconds: float, rank: int, prices: Prices) -> Costly:
    price, each = prices.of(what, rank), seconds / times
    limit = _limit(what, rank, prices)
    dated = {MEASURED: f"{MEASURED} {prices.machine.measured.split(',')[0]}".strip()}
    origin = "" if price is None else dated.get(price.origin, price.origin)
    if isinstance(what, Operation):
        size = what.read + what.written
        rate = (what.flops if limit == COMPUTE else size) / each if each else 0.0
        return Costly(operation_words(what), times, seconds, size, rate, limit, origin)
    assert isinstance(what, CollectiveOperation)
    rate = bus_bandwidth(what.kind, len(what.ranks), what.size, each) if each else 0.0
    passed = what.kind in ("send", "receive")
    among = f"{what.ranks[0]} to {what.ranks[1]}" if passed else f"of {len(what.ranks)} ranks"
    words = f"{what.kind} {what.dtype} {among}".replace("  ", " ")
    return Costly(words, times, seconds, what.size, rate, limit, origin)


def operation_words(what: Operation) -> str:
    """Return an operator as text with the shapes of at most two tensors, such as `mm 4096×4096, 4096×512 bf16`."""
    shapes = ["×".join(map(str, shape)) or "1" for shape in what.shapes[:2]]
    more = f" and {len(what.shapes) - 2} more" if len(what.shapes) > 2 else ""
    dtype = what.dtypes[0] if what.dtypes else ""
    return f"{what.name.removeprefix('aten.')} {', '.join(shapes)}{more} {dtype}".strip()
