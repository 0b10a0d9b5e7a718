"""Estimate the time of a collective, send or receive on a machine.

The time in seconds, called a price, comes from the machine's tables of measurements. Without a table, it comes from a
model of NCCL or gloo.

For NCCL, this is NCCL's own cost model. Each algorithm and protocol has a latency (hops within hosts and between hosts)
and a bandwidth, and the shortest time of all is used. Between hosts, a group has a share of each host's bandwidth,
since the other ranks of these hosts communicate in groups of their own at the same time. If the bandwidth of a link is
unknown, no time is given.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from meshwise.hardware.catalog import expected_collective, nominal_of, part, reached
from meshwise.planner.constants import BASE, FIGURES, HOP, IN_NETWORK, LL, LL128, NEVER, PROTOCOL, SIMPLE
from meshwise.planner.price import CATALOG, COMMUNICATION, MEASURED, MODEL, Priced, priced
from meshwise.planner.work import CollectiveOperation
from meshwise.spec.bandwidth import bus_factor
from meshwise.spec.machine import NODE, Link, Machine, link_between
from meshwise.spec.machine import Collective as MeasuredCollective
from meshwise.spec.timings import Timings, in_step, seconds_at

POINT_TO_POINT = ("send", "receive")
BEYOND = 4
"""An estimate is less certain for a message of more than this many times the largest measured size."""


@dataclass(frozen=True)
class Group:
    """How the ranks of a collective are spread over hosts."""

    ranks: int
    hosts: int
    each: int
    share: float


def collective_seconds(collective: CollectiveOperation, machine: Machine) -> Priced | None:
    """Estimate how long a collective takes once all ranks have begun it.
    Return None if a link's speed is unknown."""
    if max(collective.ranks, default=0) >= len(machine.devices):
        raise ValueError(f"{machine.name} has {len(machine.devices)} devices, but no rank {max(collective.ranks)}")
    if collective.size == 0 or len(set(collective.ranks)) < 2:
        return Priced(0.0, 0.0, 0.0, MODEL, COMMUNICATION)
    backend = "gloo" if machine.devices[collective.ranks[0]].kind == "cpu" else "nccl"
    if collective.kind in POINT_TO_POINT:
        return _send(collective, machine, backend)
    group = group_of(collective.ranks, machine)
    found = _measured(collective, machine, group, backend)
    if found is not None:
        return found
    return _gloo(collective, machine, group) if backend == "gloo" else _nccl(collective, machine, group)


def group_of(ranks: Sequence[int], machine: Machine) -> Group:
    """Return how these ranks are spread over the hosts of the machine."""
    on = Counter(machine.devices[rank].host for rank in ranks)
    devices = Counter(device.host for device in machine.devices)
    share = min(count / devices[host] for host, count in on.items())
    return Group(len(ranks), len(on), max(on.values()), share)


# From measurements.


def _measured(collective: CollectiveOperation, machine: Machine, group: Group, backend: str) -> Priced | None:
    """Estimate the time of a collective from the machine's measurements of this kind.
    Return None if there are none."""
    tables = [c for c in machine.collectives if c.kind == collective.kind and c.backend == backend]
    if not tables:
        return None
    whole = len(machine.hosts) == 1 or group.ranks == len(machine.devices)
    same = next((table for table in tables if table.ranks == group.ranks), None)
    if same is not None and whole:
        return _of_table(same.timings, collective.size, network=group.hosts > 1)
    if len(machine.hosts) > 1:
        return None
    nearest = min(tables, key=lambda table: abs(math.log(table.ranks / group.ranks)))
    seconds = _scaled(nearest, group.ranks, collective.size)
    return priced(seconds, FIGURES["measured.scaled"].spread, MODEL, COMMUNICATION)


def _of_table(table: Timings, size: int, network: bool) -> Priced:
    """Estimate the time of a message of `size` bytes from a table of measurements."""
    inside = size <= BEYOND * table.sizes[-1]
    spread = FIGURES["measured.collective" if inside else "measured.scaled"].spread
    return priced(seconds_at(in_step(table, network=network), size), spread, MEASURED, COMMUNICATION)


def _scaled(table: MeasuredCollective, ranks: int, size: int) -> float:
    """Scale a measured time to `ranks` ranks: latency by a ring's steps, the rest by the bytes on the busiest link."""
    timings = in_step(table.timings)
    whole = seconds_at(timings, size)
    latency = min(seconds_at(timings, 1), whole)
    steps = (ranks - 1) / (table.ranks - 1)
    return latency * steps + (whole - latency) * bus_factor(table.kind, ranks) / bus_factor(table.kind, table.ranks)


def _send(collective: CollectiveOperation, machine: Machine, backend: str) -> Priced | None:
    """Estimate the time of a message from rank `collective.ranks[0]` to rank `collective.ranks[1]`."""
    source, target = (machine.devices[rank] for rank in collective.ranks[:2])
    if source.host == target.host:
        link, share = link_between(machine, source.name, target.name), 1.0
    else:
        link = link_between(machine, f"{NODE}{source.host}", f"{NODE}{target.host}")
        share = 1 / sum(device.host == source.host for device in machine.devices)
    if link is None:
        return None
    table = link.timings.get(backend) or link.timings.get("peer")
    if table is not None:
        return _of_table(table, collective.size, network=source.host != target.host)
    return _modelled_send(collective, link, share, backend)


def _modelled_send(collective: CollectiveOperation, link: Link, share: float, backend: str) -> Priced | None:
    nominal = link.bandwidth if link.kind == "network" else nominal_of(link)[0]
    if nominal is None:
        return None
    if backend == "gloo":
        latency = link.latency if link.latency is not None else FIGURES["gloo.step"].value
        part_of, origin = FIGURES["gloo.network"].value, CATALOG
    else:
        hardware = _hardware(link.kind)
        latency = link.latency or (BASE["ring"][SIMPLE] + HOP[hardware, "ring"][SIMPLE]) * 1e-6
        known = reached(link.kind, link.generation or link.full_generation, "pair") if hardware != "network" else None
        part_of = known or FIGURES["nccl.network" if hardware == "network" else "nccl.unknown"].value
        origin = CATALOG if known else MODEL
    moving = collective.size / (nominal * share * part_of)
    return _sent(latency, moving, FIGURES["nccl.network"].spread, origin)


# NCCL.


def _nccl(collective: CollectiveOperation, machine: Machine, group: Group) -> Priced | None:
    """Estimate the time of an NCCL collective with its fastest algorithm and protocol."""
    inside = _inside(collective.kind, machine, group)
    across = _across(machine, group)
    if (group.each > 1 and inside is None) or (group.hosts > 1 and across is None):
        return None
    if collective.kind == "all-to-all":
        return _all_to_all(collective, group, inside, across)
    rates = [found for found in (inside, across) if found is not None]
    rate, spread, origin, _ = min(rates, key=lambda found: found[0])
    hardware = inside[3] if inside is not None else "network"
    costs: list[tuple[float, float]] = []
    for algorithm, factor in _algorithms(collective.kind, machine, group, hardware):
        for protocol in (LL, LL128, SIMPLE):
            latency = _latency(collective.kind, group, hardware, algorithm, protocol)
            if latency == NEVER or (protocol == LL128 and hardware == "pcie"):
                continue
            bus = rate * factor * PROTOCOL[protocol]
            costs.append((latency, collective.size * bus_factor(collective.kind, group.ranks) / bus))
    latency, moving = min(costs, key=sum)  # `costs` is never empty: a ring can always use the simple protocol
    return _sent(latency, moving, spread, origin)


Rate = tuple[float, float, str, str]
"""(bytes/s of a bus, relative error, source: `catalog` or `model`, hardware: `nvlink`, `pcie` or `network`)."""


def _inside(kind: str, machine: Machine, group: Group) -> Rate | None:
    """Return the bus rate of a ring within a host."""
    if group.each < 2:
        return None
    key = kind if kind in ("all-reduce", "all-gather", "reduce-scatter") else "all-gather"
    rate, nominal = expected_collective(machine, key, group.each)
    if nominal is None:
        return None
    links = [link for link in machine.links if link.kind not in ("network", "process", "memory")]
    hardware = "nvlink" if any(link.kind in ("nvlink", "xgmi") for link in links) else "pcie"
    if hardware == "pcie" or rate is None:
        figure = FIGURES["nccl.pcie" if hardware == "pcie" else "nccl.unknown"]
        return nominal * figure.value, figure.spread, MODEL, hardware
    return rate, FIGURES["nccl.large"].spread, CATALOG, hardware


def _across(machine: Machine, group: Group) -> Rate | None:
    """Return the rate at which the group can send data between hosts."""
    if group.hosts < 2:
        return None
    link = link_between(machine, NODE, NODE) or link_between(machine, f"{NODE}0", f"{NODE}1")
    if link is None or link.bandwidth is None:
        return None
    figure = FIGURES["nccl.network"]
    return link.bandwidth * group.share * figure.value, figure.spread, MODEL, "network"


def _algorithms(kind: str, machine: Machine, group: Group, hardware: str) -> list[tuple[str, float]]:
    """Return NCCL's algorithms for this collective, each with its rate relative to a ring."""
    found = [("ring", 1.0)]
    if kind == "all-reduce":
        found.append(("tree", 0.9))
        known = part(machine.devices[0].part)
        switched = known is not None and known.architecture in ("hopper", "blackwell") and hardware == "nvlink"
        if switched and group.hosts == 1 and group.each in IN_NETWORK and known is not None and known.link is not None:
            generation = known.link.generation
            switch, ring = (reached("nvlink", generation, way) for way in ("in-network", "all-reduce"))
            if switch is not None and ring is not None:
                found.append(("nvls", switch * IN_NETWORK[group.each] / ring))
    if kind in ("all-gather", "reduce-scatter") and group.each == 1 and group.hosts > 2:
        found.append(("pat", 1.0))
    return found


def _latency(kind: str, group: Group, hardware: str, algorithm: str, protocol: int) -> float:
    """Return the latency in seconds, summed over hops as in `ncclTopoTuneModel`."""
    none = (NEVER, NEVER, NEVER)
    inside, across = (HOP.get((link, algorithm), none)[protocol] for link in (hardware, "network"))
    twice = 2 if kind == "all-reduce" else 1
    if algorithm == "nvls":
        hops = inside
    elif algorithm == "pat":
        hops = math.ceil(math.log2(group.hosts)) * across
    elif algorithm == "tree":
        hops = 2 * ((group.each - 1) * inside + math.log2(group.hosts) * across)
    else:
        between = twice * (group.hosts - 1)
        hops = (twice * (group.ranks - 1) - between) * inside + between * across
    return (BASE[algorithm][protocol] + hops) * FIGURES["nccl.small"].value * 1e-6


def _all_to_all(collective: CollectiveOperation, group: Group, inside: Rate | None, across: Rate | None) -> Priced:
    """Estimate the time of an all-to-all of equal parts."""
    part_of_rank = collective.size / group.ranks
    legs: list[tuple[float, float, str]] = []
    if inside is not None:
        legs.append((part_of_rank * (group.each - 1) / inside[0], inside[1], inside[2]))
    if across is not None:
        away = part_of_rank * (group.ranks - group.each)
        legs.append((away * group.each / across[0], across[1], across[2]))
    moving, spread, origin = max(legs)
    hop = HOP["network", "ring"][LL] if group.hosts > 1 else HOP[inside[3] if inside else "nvlink", "ring"][LL]
    latency = (BASE["ring"][SIMPLE] + (group.ranks - 1) * hop) * 1e-6
    return _sent(latency, moving, spread, origin)


def _hardware(kind: str) -> str:
    return {"xgmi": "nvlink", "c2c": "nvlink"}.get(kind, kind) if kind != "process" else "network"


# gloo.

_STEPS: dict[str, Callable[[int], tuple[float, float]]] = {
    "all-reduce": lambda n: (2 * (n - 1), 2 * (n - 1) / n),
    "all-gather": lambda n: (n - 1, (n - 1) / n),
    "reduce-scatter": lambda n: (2 * (n - 1), 2 * (n - 1) / n),  # gloo does an all-reduce, and each rank keeps its part
    "all-to-all": lambda n: (n - 1, (n - 1) / n),
    "broadcast": lambda n: (math.ceil(math.log2(n)), math.ceil(math.log2(n))),
}
"""For each gloo collective over n ranks: the number of successive messages, and the bytes sent per byte of tensor."""


def _gloo(collective: CollectiveOperation, machine: Machine, group: Group) -> Priced | None:
    """Estimate the time of a gloo collective as a sequence of messages."""
    if collective.kind not in _STEPS:
        return None
    steps, carried = _STEPS[collective.kind](group.ranks)
    message = collective.size * carried / steps
    legs: list[Priced] = []
    if group.each > 1:
        table = _pair(machine)
        if table is None:
            return None
        seconds = steps * seconds_at(table, max(int(message), 1))
        legs.append(priced(seconds, FIGURES["gloo.pairs"].spread, MODEL, COMMUNICATION))
    if group.hosts > 1:
        across = _gloo_across(machine, group, steps, message)
        if across is None:
            return None
        legs.append(across)
    return max(legs, key=lambda leg: leg.seconds)


def _pair(machine: Machine) -> Timings | None:
    """Return the measurements of gloo between two processes of a host, for the slowest pair."""
    tables = [link.timings["gloo"] for link in machine.links if "gloo" in link.timings and link.kind != "network"]
    return max(tables, key=lambda table: seconds_at(table, 1 << 20)) if tables else None


def _gloo_across(machine: Machine, group: Group, steps: float, message: float) -> Priced | None:
    link = link_between(machine, f"{NODE}0", f"{NODE}1")
    if link is None:
        return None
    concurrent = 1 / group.share  # how many groups use the same hosts at once
    if "gloo" in link.timings:
        seconds = steps * seconds_at(link.timings["gloo"], max(int(message * concurrent), 1))
        return priced(seconds, FIGURES["gloo.pairs"].spread, MODEL, COMMUNICATION)
    if link.bandwidth is None:
        return None
    step = FIGURES["gloo.step"]
    latency = steps * (link.latency if link.latency is not None else step.value)
    figure = FIGURES["gloo.network"]
    moving = steps * message * concurrent / (link.bandwidth * figure.value)
    return _sent(latency, moving, figure.spread, CATALOG, step.spread)


def _sent(latency: float, moving: float, spread: float, origin: str, of_latency: float | None = None) -> Priced:
    """Estimate the time of a message from its latency and the time to move its bytes, each with a relative error."""
    small = FIGURES["nccl.small"].spread if of_latency is None else of_latency
    total = latency + moving
    return priced(total, (latency * small + moving * spread) / total if total > 0 else 1.0, origin, COMMUNICATION)
