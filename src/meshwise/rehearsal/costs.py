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

    place: the index of the launch in `Work.events`.
    price: the time on its stream.
    host: the time that the host takes to launch it.
    share: the resource that it uses, such as COMPUTING.
    blocks: whether the host waits until it has ended.
    number: for a collective, its index among the collectives of the same kind and ranks in the step.
    joins: whether it can be simulated as one item with the launch before it. Then these two launches are operators on
        the same stream, and no third launch waits for the end of the earlier operator.
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
    """Return the items to simulate for the launches of one rank.

    ends: for each factor, such as `compute`, which end of the uncertainty interval to use: `low` or `high`. For
        example, `{"compute": "high"}` takes the upper end of every time that depends on compute. Other times are taken
        as estimated.
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
    """Join consecutive operators on a stream into one item.

    An operator begins when the host has launched it and the operator before it has ended. The item's field `late` is
    the time from the beginning of the first launch until the last operator ends, if nothing else delays the operators.

    ends: see `items`.
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
