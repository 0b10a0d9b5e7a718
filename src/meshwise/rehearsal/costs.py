"""Convert a rank's priced launches to the items of a simulation.

An item is one launch, or several consecutive operators.

Tested in tests/rehearsal/test_simulate.py.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from meshwise.rehearsal.play import ACROSS, COMPUTING, INSIDE, TO_DEVICE, TO_HOST, Item
from meshwise.rehearsal.price import Priced
from meshwise.rehearsal.prices import Prices
from meshwise.rehearsal.work import MAIN, CollectiveOperation, Copy, Launch, Operation, Work
from meshwise.spec.machine import Machine


@dataclass(frozen=True, slots=True)
class Cost:
    """A launch and its estimated times. An estimated time with its interval is called a price.

    price: the time on its stream.
    host: the time that the host takes to launch it.
    share, blocks, number: as in `Item`.
    joins: whether it can be joined to the launch before it. This is so if both are operators on the same stream, and no
    launch waits for the first of them.
    """

    launch: Launch
    place: int
    price: Priced
    host: Priced
    share: int
    blocks: bool
    number: int
    joins: bool


def costs_of(work: Work, prices: Prices) -> list[Cost] | None:
    """Return the launches of a step with their estimated times. Return None if one of the times is unknown."""
    found: list[Cost] = []
    numbers: dict[tuple[str, tuple[int, ...]], int] = defaultdict(int)
    awaited = {place for launch in work.launches for place in launch.after}
    tier = functools.cache(lambda ranks: _tier(ranks, prices.machine))
    cpu, rank = work.kind == "cpu", work.rank
    for place, launch in enumerate(work.events):
        if not isinstance(launch, Launch):
            continue
        what, number, share = launch.what, 0, COMPUTING
        if (price := prices.of(what, rank)) is None:
            return None
        if isinstance(what, CollectiveOperation):
            number = numbers[what.kind, what.ranks]
            numbers[what.kind, what.ranks] = number + 1
            share = tier(what.ranks)
        elif isinstance(what, Copy):
            share = TO_HOST if what.to == "host" else TO_DEVICE
        blocks = launch.blocks or (cpu and launch.stream == MAIN)  # it computes itself
        before = found[-1] if found else None
        joins = (
            before is not None
            and isinstance(what, Operation)
            and isinstance(before.launch.what, Operation)
            and launch.stream == before.launch.stream
            and not launch.after
            and before.place not in awaited
            and (cpu or not before.blocks)
        )
        host = prices.host(what, rank, launch.phase, work.dtensors)
        found.append(Cost(launch, place, price, host, share, blocks, number, joins))
    return found


def items(costs: Sequence[Cost], ends: Mapping[str, str], merged: bool = False) -> list[Item]:
    """Return the items to simulate for a rank's launches.

    ends: maps the name of a factor to `low` or `high`. Times that depend on this factor are taken at that end of their
    interval.
    merged: whether to join consecutive operators into one item that takes the same time on the stream and on the host.
    """
    if not merged:
        return [_item(cost, ends) for cost in costs]
    return [_item(row[0], ends) if len(row) == 1 else _joined(row, ends) for row in _rows(costs)]


def _item(cost: Cost, ends: Mapping[str, str]) -> Item:
    seconds, host = _at(cost.price, ends), _at(cost.host, ends)
    return Item(cost.place, cost.launch, seconds, host, cost.share, cost.blocks, cost.number)


def _rows(costs: Sequence[Cost]) -> Iterator[Sequence[Cost]]:
    first = 0
    for place in range(1, len(costs) + 1):
        if place == len(costs) or not costs[place].joins:
            yield costs[first:place]
            first = place


def _joined(row: Sequence[Cost], ends: Mapping[str, str]) -> Item:
    """Join consecutive operators into one item.

    The field `late` of the item is the time at which the last operator can end at the earliest. Each operator waits for
    its own launch and for the operator before it.
    """
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
