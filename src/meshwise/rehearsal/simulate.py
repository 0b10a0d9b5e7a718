"""Simulate: traced steps of one or more ranks on a machine become one step with its time, and an interval of it.

Errors of prices of one factor (computing, memory, communication, launches) go together and those of different factors
are independent: the step is played again with each factor at both ends of its interval, and the differences are added
as squares.

Tested in tests/rehearsal/test_simulate.py.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from meshwise.rehearsal.play import ACROSS, COMPUTING, INSIDE, TO_DEVICE, TO_HOST, Done, Item, play
from meshwise.rehearsal.price import FACTORS, Priced
from meshwise.rehearsal.prices import Overlap, Prices, missing, overlap_of
from meshwise.rehearsal.work import MAIN, Collective, Copy, Launch, Operation, Work
from meshwise.spec.errors import UsageError
from meshwise.spec.machine import Machine


@dataclass(frozen=True)
class Step:
    """A step as it is predicted. seconds: until the last simulated rank has ended; low and high: its 80 % interval.

    done: what was done when, by rank, each in the order of its beginnings. factors: how many seconds the step is longer
    with each factor at the upper end of its interval.
    """

    seconds: float
    low: float
    high: float
    done: Mapping[int, tuple[Done, ...]]
    factors: Mapping[str, float]

    @property
    def ranks(self) -> tuple[int, ...]:
        """Those that were simulated."""
        return tuple(self.done)


@dataclass(frozen=True, slots=True)
class _Cost:
    launch: Launch
    place: int
    price: Priced
    host: Priced
    share: int
    blocks: bool
    number: int


def simulate(
    works: Sequence[Work],
    machine: Machine | Prices,
    *,
    interval: bool = True,
    overlap: Overlap | None = None,
) -> Step:
    """The step of these ranks, which are different ones, such as one of each stage of a pipeline.

    machine: or its prices, to use them again. interval: without it low and high are the seconds, nine times as fast.
    overlap: in place of the constants. Raises UsageError where a price is not known (`missing` says which first), or
    the machine has too few devices, ValueError where the ranks wait for each other for ever.
    """
    prices = machine if isinstance(machine, Prices) else Prices(machine)
    if unknown := missing(works, prices):
        raise UsageError(
            f"machine '{prices.machine.name}': the time of a step is not known. {unknown[0]}. Measure the machine with "
            "`meshwise bench --save FILE`, or write what you know of it into a machine file."
        )
    if len({work.rank for work in works}) < len(works):
        raise ValueError(f"works of the ranks {[work.rank for work in works]}: each must be of another rank")
    devices = prices.machine.devices
    overlaps = {work.rank: overlap or overlap_of(devices[work.rank]) for work in works}
    costs = {work.rank: _costs(work, prices) for work in works}
    done = play(_items(costs, {}), overlaps)
    seconds = _length(done)
    low = high = seconds
    factors: dict[str, float] = {}
    if interval:
        under, over = [], []
        for factor in FACTORS:
            faster, slower = (_length(play(_items(costs, {factor: end}), overlaps)) for end in ("low", "high"))
            factors[factor] = max(slower - seconds, 0.0)
            under.append(max(seconds - faster, 0.0))
            over.append(factors[factor])
        low, high = seconds - min(math.hypot(*under), seconds), seconds + math.hypot(*over)
    by_rank: dict[int, list[Done]] = {work.rank: [] for work in works}
    for one in done:
        by_rank[one.rank].append(one)
    ordered = {rank: tuple(sorted(own, key=lambda one: (one.start, one.place))) for rank, own in by_rank.items()}
    return Step(seconds, low, high, ordered, factors)


def _costs(work: Work, prices: Prices) -> list[_Cost]:
    found = []
    numbers: dict[tuple[str, tuple[int, ...]], int] = defaultdict(int)
    for place, launch in enumerate(work.events):
        if not isinstance(launch, Launch):
            continue
        what, number = launch.what, 0
        price = prices.of(what, work.rank)
        assert price is not None  # `missing` found none
        if isinstance(what, Collective):
            number = numbers[what.kind, what.ranks]
            numbers[what.kind, what.ranks] = number + 1
        share = _share(what, prices.machine)
        blocks = launch.blocks or (work.kind == "cpu" and _waits(launch))
        found.append(_Cost(launch, place, price, prices.host(what, work.rank), share, blocks, number))
    return found


def _waits(launch: Launch) -> bool:
    """Whether the host of a CPU worker waits for it: it computes itself, and receives before it goes on."""
    what = launch.what
    return (
        launch.stream == MAIN
        or isinstance(what, Operation)
        or (isinstance(what, Collective) and what.kind == "receive")
    )


def _share(what: Operation | Collective | Copy, machine: Machine) -> int:
    if isinstance(what, Operation):
        return COMPUTING
    if isinstance(what, Copy):
        return TO_HOST if what.to == "host" else TO_DEVICE
    hosts = {machine.devices[rank].host for rank in what.ranks}
    return ACROSS if len(hosts) > 1 else INSIDE


def _items(costs: Mapping[int, Sequence[_Cost]], ends: Mapping[str, str]) -> dict[int, list[Item]]:
    """With the prices of a factor at an end of their intervals, `low` or `high`."""
    return {
        rank: [
            Item(
                cost.place,
                cost.launch,
                _at(cost.price, ends),
                _at(cost.host, ends),
                cost.share,
                cost.blocks,
                cost.number,
            )
            for cost in own
        ]
        for rank, own in costs.items()
    }


def _at(price: Priced, ends: Mapping[str, str]) -> float:
    end = ends.get(price.factor)
    return price.seconds if end is None else price.low if end == "low" else price.high


def _length(done: Sequence[Done]) -> float:
    return max((one.end for one in done), default=0.0)
