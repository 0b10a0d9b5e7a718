"""Seconds of collectives: tables first, NCCL's sums, tiers, shares of the network, and None where a link is unknown."""

from __future__ import annotations

from dataclasses import replace

import pytest

from meshwise.hardware.words import machine_from_words
from meshwise.planner.collective_price import collective_seconds, group_of
from meshwise.planner.price import CATALOG, MEASURED, MODEL, Priced
from meshwise.planner.work import CollectiveOperation
from meshwise.spec.bandwidth import bus_bandwidth
from meshwise.spec.machine import Collective as MeasuredCollective
from meshwise.spec.machine import Link, Machine
from meshwise.spec.timings import fitted

EIGHT = machine_from_words("8xH100")
HOSTS = machine_from_words("4x8xH100@400GB")
LARGE = 1 << 34


def of(kind: str, size: int, machine: Machine = EIGHT, ranks: int | tuple[int, ...] | None = None) -> Priced:
    chosen = tuple(range(len(machine.devices) if ranks is None else ranks)) if not isinstance(ranks, tuple) else ranks
    found = collective_seconds(CollectiveOperation(kind, size, chosen), machine)
    assert found is not None and found.low <= found.seconds <= found.high
    return found


def bus(kind: str, size: int, machine: Machine = EIGHT, ranks: int | tuple[int, ...] | None = None) -> float:
    count = len(ranks) if isinstance(ranks, tuple) else ranks or len(machine.devices)
    return bus_bandwidth(kind, count, size, of(kind, size, machine, ranks).seconds)


@pytest.mark.parametrize(
    ("kind", "ranks", "rate"),
    [("all-reduce", 8, 480e9), ("all-reduce", 4, 363e9), ("all-gather", 8, 361e9), ("reduce-scatter", 8, 363e9)],
)
def test_large_collectives_inside_a_host_reach_what_was_measured(kind: str, ranks: int, rate: float) -> None:
    assert bus(kind, LARGE, EIGHT, ranks) == pytest.approx(rate, rel=0.05)
    assert of(kind, LARGE, EIGHT, ranks).origin == CATALOG


def test_small_messages_take_the_latency_of_few_hops_and_grow_with_the_ranks() -> None:
    small = of("all-reduce", 1024).seconds
    assert 5e-6 < small < 60e-6
    assert of("all-gather", 1024).seconds < small
    assert of("all-reduce", 1024, EIGHT, 2).seconds < small
    assert bus("all-reduce", 32 << 10) < bus("all-reduce", 1 << 20) < bus("all-reduce", 1 << 30)
    assert bus("all-reduce", 32 << 10) < 0.02 * bus("all-reduce", 1 << 30)


def test_time_never_falls_with_the_size() -> None:
    for kind in ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "broadcast"):
        for machine in (EIGHT, HOSTS):
            times = [of(kind, 1 << power, machine).seconds for power in range(8, 36)]
            assert times == sorted(times), kind


def test_a_ring_over_hosts_is_limited_by_the_slower_tier() -> None:
    slow = machine_from_words("4x8xH100@100GB")
    assert bus("all-gather", LARGE, slow) == pytest.approx(0.9 * 100e9, rel=0.05)
    assert bus("all-gather", LARGE, HOSTS) == pytest.approx(0.9 * 400e9, rel=0.07)
    assert of("all-gather", LARGE, slow).origin == MODEL
    inside = tuple(range(8, 16))
    assert bus("all-gather", LARGE, slow, inside) == pytest.approx(bus("all-gather", LARGE), rel=0.01)


def test_groups_of_one_rank_a_host_share_the_network_with_their_neighbours() -> None:
    column = tuple(range(0, 32, 8))
    assert group_of(column, HOSTS).share == 1 / 8
    assert bus("all-reduce", LARGE, HOSTS, column) == pytest.approx(0.9 * 400e9 / 8, rel=0.05)
    alone = machine_from_words("4x1xH100@50GB")
    assert bus("all-reduce", LARGE, alone) == pytest.approx(0.9 * 50e9, rel=0.05)


def test_messages_between_stages() -> None:
    beside = of("send", 1 << 30, HOSTS, (0, 1))
    away = of("receive", 1 << 30, HOSTS, (0, 8))
    assert (1 << 30) / beside.seconds == pytest.approx(0.88 * 450e9, rel=0.05)
    assert (1 << 30) / away.seconds == pytest.approx(0.9 * 50e9, rel=0.05)


def test_all_to_all_is_limited_by_what_leaves_the_host() -> None:
    slow = machine_from_words("2x8xH100@100GB")
    size = 1 << 34
    assert of("all-to-all", size, slow).seconds == pytest.approx(size * 8 * 8 / 16 / 0.9 / 100e9, rel=0.05)
    assert of("all-to-all", size, slow, 8).seconds < 0.1 * of("all-to-all", size, slow).seconds


def test_links_that_are_a_mesh_carry_more_with_more_ranks() -> None:
    mesh = machine_from_words("8xMI300X")
    assert bus("all-gather", LARGE, mesh, 8) > 3 * bus("all-gather", LARGE, mesh, 2)


def test_a_table_of_the_machine_comes_first() -> None:
    sizes = (1 << 10, 1 << 20, 1 << 30)
    table = MeasuredCollective("all-reduce", 8, "nccl", fitted(sizes, [20e-6, 50e-6, 10e-3]))
    measured = replace(EIGHT, collectives=(table,))
    price = of("all-reduce", 1 << 20, measured)
    assert (price.seconds, price.origin) == (pytest.approx(50e-6), MEASURED)
    fewer = of("all-reduce", 1 << 30, measured, 4)
    assert fewer.origin == MODEL and fewer.seconds == pytest.approx(10e-3 * 1.5 / 1.75, rel=0.05)
    assert of("all-gather", 1 << 20, measured).origin == CATALOG


def test_a_collective_takes_as_long_as_a_step_that_called_it_waited() -> None:
    table = fitted((1 << 10, 1 << 20), [1e-3, 2e-3], in_step=[3e-3, 8e-3])
    collective, link = MeasuredCollective("all-reduce", 2, "gloo", table), Link("cpu:0", "cpu:1", "process")
    link = replace(link, timings={"gloo": table})
    measured = replace(machine_from_words("4xcpu"), collectives=(collective,), links=(link,))
    price = collective_seconds(CollectiveOperation("all-reduce", 1 << 20, (0, 1)), measured)
    assert price is not None and price.seconds == pytest.approx(8e-3)
    more = collective_seconds(CollectiveOperation("all-reduce", 1 << 20, (0, 1, 2, 3)), measured)
    assert more is not None and more.seconds == pytest.approx(3e-3 * 3 + 5e-3 * 1.5)
    sent = collective_seconds(CollectiveOperation("send", 1 << 10, (0, 1)), measured)
    assert sent is not None and sent.seconds == pytest.approx(3e-3)


def test_processes_of_one_host_have_only_what_was_measured() -> None:
    described = machine_from_words("4xcpu")
    assert collective_seconds(CollectiveOperation("all-reduce", 1 << 20, (0, 1)), described) is None
    pair = fitted((1 << 10, 1 << 20, 1 << 26), (1e-4, 1e-3, 60e-3))
    link = Link("cpu:0", "cpu:1", "process", timings={"gloo": pair})
    measured = replace(described, links=(link,))
    price = of("all-reduce", 1 << 21, measured, 2)
    assert price.seconds == pytest.approx(2e-3) and price.origin == MODEL
    send = of("send", 1 << 20, measured, (0, 1))
    assert send.seconds == pytest.approx(1e-3) and send.origin == MEASURED


def test_gloo_between_hosts_has_the_network() -> None:
    hosts = machine_from_words("2x1xcpu@1Gb")
    size = 125_000_000
    assert of("all-reduce", size, hosts).seconds == pytest.approx(1 / 0.95, rel=0.01)
    assert of("send", size, hosts, (0, 1)).seconds == pytest.approx(1 / 0.95, rel=0.01)
    two = machine_from_words("2x2xcpu@1Gb")
    column = collective_seconds(CollectiveOperation("all-reduce", size, (0, 2)), two)
    assert column is not None and column.seconds == pytest.approx(2 / 0.95, rel=0.01)


def test_gloo_between_hosts_takes_what_was_measured_between_them() -> None:
    """As `meshwise bench --hosts` writes it: a message of 125 MB in 2 s, half of what the network's word says."""
    hosts = machine_from_words("2x1xcpu@1Gb")
    table = fitted((1 << 10, 125_000_000), (1e-4, 2.0))
    measured = replace(hosts, links=(Link("node0", "node1", "network", timings={"gloo": table}), *hosts.links))
    whole = of("all-reduce", 250_000_000, measured)  # two messages of half of it
    assert whole.seconds == pytest.approx(4.0, rel=0.01) and whole.origin == MODEL
    assert of("send", 125_000_000, measured, (0, 1)).seconds == pytest.approx(2.0, rel=0.01)


def test_what_is_not_known_has_no_time() -> None:
    dark = machine_from_words("2x8xH100")
    assert collective_seconds(CollectiveOperation("all-reduce", 1 << 20, tuple(range(16))), dark) is None
    assert collective_seconds(CollectiveOperation("all-reduce", 1 << 20, tuple(range(8))), dark) is not None
    assert collective_seconds(CollectiveOperation("send", 1 << 20, (0, 8)), dark) is None
    bare = Machine("bare", EIGHT.devices)
    assert collective_seconds(CollectiveOperation("all-gather", 1 << 20, (0, 1)), bare) is None
    assert of("all-reduce", 1 << 20, bare, (3,)).seconds == 0.0
    with pytest.raises(ValueError, match="8 devices, but no rank 9"):
        collective_seconds(CollectiveOperation("all-reduce", 4, (0, 9)), EIGHT)
