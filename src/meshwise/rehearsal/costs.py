"""Convert a rank's priced launches to the items of a simulation.

An item is one launch, or several consecutive operators.

Tested in tests/rehearsal/test_simulate.py.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from meshwise.rehearsal.play import ACROSS, COMPUTING, INSIDE, TO_DEVICE, TO_HOST, Item
from meshwise.rehearsal.price import Priced
from meshwise.rehearsal.prices import Prices
from meshwise.rehearsal.work import MAIN, CollectiveOperation, Copy, Launch, Work
from meshwise.spec.machine import Machine

Rows = Callable[["Sequence[Cost]", Mapping[str, str]], Iterator["Sequence[Cost]"]]


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
        blocks = launch.blocks or (cpu and launch.stream == MAIN)  # it computes itself
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
    """Return the items to simulate for the launches of one rank.

    ends: for each factor, such as `compute`, which end of the uncertainty interval to use: `low` or `high`. For
        example, `{"compute": "high"}` takes the upper end of every time that depends on compute. Other times are taken
        as estimated.
    rows: returns which consecutive operators to join into one item that takes the same time on the stream and on the
        host. None joins none.
    """
    if rows is None:
        return [_item(cost, ends) for cost in costs]
    return [_item(row[0], ends) if len(row) == 1 else _joined(row, ends) for row in rows(costs, ends)]


def _item(cost: Cost, ends: Mapping[str, str]) -> Item:
    seconds, host = _at(cost.price, ends), _at(cost.host, ends)
    return Item(cost.place, cost.launch, seconds, host, cost.share, cost.blocks, cost.number)


def all_that_join(costs: Sequence[Cost], ends: Mapping[str, str]) -> Iterator[Sequence[Cost]]:
    """Yield rows of operators that can be joined."""
    first = 0
    for place in range(1, len(costs) + 1):
        if place == len(costs) or not costs[place].joins:
            yield costs[first:place]
            first = place


def launched_in_time(costs: Sequence[Cost], ends: Mapping[str, str]) -> Iterator[Sequence[Cost]]:
    """Yield rows of operators of which the host launches each before the one before it can have ended."""
    first, ahead = 0, 0.0  # how long the device still has to do when the host launches
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
