"""Simulate traced steps on a machine, with an interval for the time.

The errors of prices that depend on the same factor (computing, memory, communication, launches, overlap) are
correlated. The errors of different factors are independent. So the step is simulated again with each factor at both
ends of its interval, and the differences are added as squares.

If microbatches follow each other evenly, those that the step leaves out take as long as their neighbors.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from meshwise.planner.constants import FIGURES
from meshwise.planner.event_loop import ACROSS, COMPUTING, INSIDE, TO_DEVICE, TO_HOST, Done, Item, play
from meshwise.planner.insertions import NotExtrapolable
from meshwise.planner.price import FACTORS, Priced
from meshwise.planner.prices import Overlap, Prices, missing, overlap_of
from meshwise.planner.work import MAIN, CollectiveOperation, Copy, Launch, Work
from meshwise.spec.errors import UsageError
from meshwise.spec.machine import Machine

Rows = Callable[["Sequence[Cost]", Mapping[str, str]], Iterator["Sequence[Cost]"]]


@dataclass(frozen=True, slots=True)
class Cost:
    """A launch and its estimated times. An estimated time with its interval is called a price."""

    launch: Launch
    place: int
    price: Priced
    host: Priced
    share: int
    blocks: bool
    number: int
    joins: bool


def costs_of(work: Work, prices: Prices) -> list[Cost] | None:
    """Return the launches of a step with their estimated times, or None if a time is unknown."""
    found: list[Cost] = []
    counts: dict[tuple[str, tuple[int, ...]], Iterator[int]] = defaultdict(itertools.count)
    known: dict[tuple[int, str], tuple[Priced, Priced, int, Iterator[int] | None]] = {}
    awaited = {place for launch in work.launches for place in launch.after}
    cpu, rank, before = work.kind == "cpu", work.rank, None
    for place, launch in enumerate(work.events):
        if not isinstance(launch, Launch):
            continue
        what = launch.what
        facts = known.get((id(what), launch.phase))
        if facts is None:
            if (price := prices.of(what, rank)) is None:
                return None
            share, count = COMPUTING, None
            if isinstance(what, CollectiveOperation):
                share, count = _tier(what.ranks, prices.machine), counts[what.kind, what.ranks]
            elif isinstance(what, Copy):
                share = TO_HOST if what.to == "host" else TO_DEVICE
            facts = price, prices.host(what, rank, launch.phase, work.dtensors), share, count
            known[id(what), launch.phase] = facts
        price, host, share, count = facts
        blocks = launch.blocks or (cpu and launch.stream == MAIN)  # on a CPU, the host itself computes
        joins = (
            before is not None
            and share == before.share == COMPUTING
            and launch.stream == before.launch.stream
            and not launch.after
            and before.place not in awaited
            and (cpu or not before.blocks)
        )
        before = Cost(launch, place, price, host, share, blocks, 0 if count is None else next(count), joins)
        found.append(before)
    return found


def items(costs: Sequence[Cost], ends: Mapping[str, str], rows: Rows | None = None) -> list[Item]:
    """Return the items to simulate for the launches of one rank."""
    if rows is None:
        return [_item(cost, ends) for cost in costs]
    return [_item(row[0], ends) if len(row) == 1 else _joined(row, ends) for row in rows(costs, ends)]


def _item(cost: Cost, ends: Mapping[str, str]) -> Item:
    seconds, host = _at(cost.price, ends), _at(cost.host, ends)
    return Item(cost.place, cost.launch, seconds, host, cost.share, cost.blocks, cost.number)


def all_that_join(costs: Sequence[Cost], ends: Mapping[str, str]) -> Iterator[Sequence[Cost]]:
    """Yield rows of launches, each to be joined into one item."""
    first = 0
    for place in range(1, len(costs) + 1):
        if place == len(costs) or not costs[place].joins:
            yield costs[first:place]
            first = place


def launched_in_time(costs: Sequence[Cost], ends: Mapping[str, str]) -> Iterator[Sequence[Cost]]:
    """Yield rows of operators.
    The host launches each operator of a row before the previous one can have ended."""
    first, ahead = 0, 0.0  # ahead: seconds of work that the device still has when the host launches
    for place, cost in enumerate(costs):
        ahead -= _at(cost.host, ends)
        if place and (ahead < 0 or not cost.joins or costs[place - 1].blocks):
            yield costs[first:place]
            first = place
        ahead = _at(cost.price, ends) + (ahead if first < place else 0.0)
    yield costs[first:]


def _joined(row: Sequence[Cost], ends: Mapping[str, str]) -> Item:
    """Join consecutive operators on a stream into one item."""
    host = late = seconds = 0.0
    for cost in row:
        own = _at(cost.price, ends)
        host += _at(cost.host, ends)
        late = max(late, host) + own
        seconds += own
    last = row[-1]
    lead = _at(row[0].host, ends)
    return Item(last.place, row[0].launch, seconds, host, COMPUTING, last.blocks, 0, lead, late)


def _at(price: Priced, ends: Mapping[str, str]) -> float:
    end = ends.get(price.factor) if ends else None
    return price.seconds if end is None else price.low if end == "low" else price.high


def _tier(ranks: Sequence[int], machine: Machine) -> int:
    return ACROSS if len({machine.devices[rank].host for rank in ranks}) > 1 else INSIDE


EVENLY = 1e-7
"""The fraction by which a period may differ from the next because of rounding."""


def around(costs: Sequence[Cost], left_out: range) -> tuple[int, ...]:
    """Return the place of a rank's last launch in each of the four microbatches around the left-out ones."""
    near = left_out.start - 2, left_out.start - 1, left_out.stop, left_out.stop + 1
    last = {cost.launch.microbatch: cost.place for cost in costs}
    return tuple(last[number] for number in near)


def period_of(
    items: Mapping[int, Sequence[Item]], done: Iterable[Done], places: Mapping[int, tuple[int, ...]]
) -> float:
    """Return the seconds from one microbatch to the next, at the place where microbatches are left out."""
    ends: dict[int, dict[int, float]] = {rank: {} for rank in items}
    for one in done:
        ends[one.rank][one.place] = one.end
    period = 0.0
    for rank, own in items.items():
        at = [item.place for item in own]
        near = [bisect_left(at, place) for place in places[rank]]  # joined operators have the place of the last one
        before, here, after = ([ends[rank][n] for n in at[a + 1 : b + 1]] for a, b in itertools.pairwise(near))
        period = period or here[-1] - before[-1]
        pairs = itertools.chain(itertools.zip_longest(before, here), itertools.zip_longest(here, after))
        if not all(one and other and abs(other - one - period) < EVENLY * period for one, other in pairs):
            raise NotExtrapolable("microbatches follow each other unevenly where some are left out")
        if sum(item.host for item in own[near[1] + 1 : near[2] + 1]) > period * (1 + EVENLY):
            raise NotExtrapolable("a host launches slower than its device computes")
    return period


def within_period(done: Sequence[Done], left_out: range, period: float) -> tuple[Done, ...]:
    """Return what a rank does during one period, in seconds from its beginning."""
    begin = max(one.end for one in done if one.launch.microbatch == left_out.start - 1)

    def clipped(time: float) -> float:
        return min(max(time - begin, 0.0), period)

    return tuple(
        replace(one, ready=clipped(one.ready), start=clipped(one.start), end=clipped(one.end))
        for one in done
        if one.end > begin and one.ready < begin + period
    )


OVERLAP, STEP = "overlap", "step"
"""Causes of uncertainty besides FACTORS: how much overlapping activities slow each other, and unknown effects."""


@dataclass(frozen=True)
class Step:
    """A simulated step."""

    seconds: float
    low: float
    high: float
    done: Mapping[int, tuple[Done, ...]]
    factors: Mapping[str, float]
    left_out: range = range(0)
    period: float = 0.0

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that were simulated. Each stands for all ranks that do the same work."""
        return tuple(self.done)


def simulate(
    works: Sequence[Work],
    machine: Machine | Prices,
    *,
    interval: bool = True,
    merged: bool = False,
    overlap: Overlap | None = None,
) -> Step:
    """Simulate the step of several ranks, such as one rank of each pipeline stage."""
    prices = machine if isinstance(machine, Prices) else Prices(machine)
    costs = _costs(works, prices)
    devices = prices.machine.devices
    overlaps = {rank: overlap or overlap_of(devices[rank]) for rank in costs}
    left_out = works[0].left_out if works else range(0)
    near = {rank: around(own, left_out) for rank, own in costs.items()} if left_out else {}

    def played(
        ends: Mapping[str, str], rows: Rows | None, overlapping: Mapping[int, Overlap]
    ) -> tuple[list[Done], float]:
        own = {rank: items(each, ends, rows) for rank, each in costs.items()}
        done = play(own, overlapping)
        return done, period_of(own, done, near) if left_out else 0.0

    def length(ends: Mapping[str, str], overlapping: Mapping[int, Overlap] = overlaps) -> float:
        done, period = played(ends, all_that_join, overlapping)
        return _length(done) + len(left_out) * period

    done, period = played({}, launched_in_time if merged else None, overlaps)
    seconds = low = high = _length(done) + len(left_out) * period
    factors: dict[str, float] = {}
    if interval:
        middle, under = length({}), []
        for factor in FACTORS:
            faster, slower = (length({factor: end}) for end in ("low", "high"))
            factors[factor] = max(slower - middle, 0.0)
            under.append(max(middle - faster, 0.0))
        if overlap is None:
            least, most = ({rank: overlap_of(devices[rank], way) for rank in costs} for way in (-1, 1))
            factors[OVERLAP] = max(length({}, most) - middle, 0.0)
            under.append(max(middle - length({}, least), 0.0))
            spread = FIGURES["step" if devices[0].kind == "cpu" else "step.gpu"].spread
            factors[STEP] = seconds * (spread - 1)
            under.append(seconds * (1 - 1 / spread))
        low, high = max(seconds - math.hypot(*under), 0.0), seconds + math.hypot(*factors.values())
    by_rank: dict[int, list[Done]] = {rank: [] for rank in costs}
    for one in done:
        by_rank[one.rank].append(one)
    ordered = {rank: tuple(sorted(own, key=lambda one: (one.start, one.place))) for rank, own in by_rank.items()}
    return Step(seconds, low, high, ordered, factors, left_out, period)


def _costs(works: Sequence[Work], prices: Prices) -> dict[int, list[Cost]]:
    if len({work.rank for work in works}) < len(works):
        raise ValueError(f"each rank must have one trace, but the traces are for ranks {[work.rank for work in works]}")
    if all(work.ranks <= len(prices.machine.devices) for work in works):
        costs = {work.rank: own for work in works if (own := costs_of(work, prices)) is not None}
        if len(costs) == len(works):
            return costs
    unknown = missing(works, prices)
    raise UsageError(
        f"machine '{prices.machine.name}': the time of a step is unknown: {unknown[0]}. Measure the machine with "
        "`meshwise bench --save FILE`, or write its figures into a machine file."
    )


def _length(done: Sequence[Done]) -> float:
    return max((one.end for one in done), default=0.0)
