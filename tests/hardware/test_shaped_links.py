"""Collectives between hosts with links of known speed: how many bytes each host really sends, and what is reached.

Bytes are counted by the hosts' interfaces. They show what explains the rates: gloo's broadcast leaves its source once a
branch of a tree, its reduce-scatter sends as much as an all-reduce, and our own compositions send what they must.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import torch
from torch import Tensor

from meshwise.hardware.measure.processes import measure_hosts
from meshwise.hardware.measure.result import PathResult
from meshwise.spec.bandwidth import bus_bandwidth
from meshwise.spec.timings import seconds_at
from meshwise.transfer import collectives
from meshwise.workers.join import join
from tests.hosts import INTERFACE, Host, bits_of, hosts, run_on, why_not

pytestmark = [pytest.mark.usefixtures("processes"), pytest.mark.skipif(why_not() is not None, reason=str(why_not()))]

SIZE = 6 << 20
SENT = Path(f"/sys/class/net/{INTERFACE}/statistics/tx_bytes")
OPERATIONS: dict[str, Callable[[Tensor], Any]] = {
    "all-reduce": lambda tensor: collectives.all_reduce(tensor),
    "send from 0 to 1": lambda tensor: (
        collectives.send(tensor, 1)
        if collectives.get_rank() == 0
        else collectives.receive(tensor, 0)
        if collectives.get_rank() == 1
        else None
    ),
    "broadcast": lambda tensor: collectives.broadcast(tensor),
    "gloo's broadcast": lambda tensor: collectives.broadcast(tensor, direct=False),
    "all-gather": lambda tensor: collectives.all_gather(tensor[: len(tensor) // collectives.world_size()]),
    "reduce-scatter": lambda tensor: collectives.reduce_scatter(tensor),
    "gloo's reduce-scatter": lambda tensor: collectives.reduce_scatter(tensor, direct=False),
    "all-to-all": lambda tensor: collectives.all_to_all(tensor),
}
# Times the tensor's bytes that ranks 0, 1 and 2 of three send, and 0 and 1 of two.
THREE = {
    "all-reduce": (4 / 3, 4 / 3, 4 / 3),
    "send from 0 to 1": (1, 0, 0),
    "broadcast": (1, 1, 0),
    "gloo's broadcast": (2, 0, 0),
    "all-gather": (2 / 3, 2 / 3, 2 / 3),
    "reduce-scatter": (2 / 3, 2 / 3, 2 / 3),
    "gloo's reduce-scatter": (4 / 3, 4 / 3, 4 / 3),
    "all-to-all": (2 / 3, 2 / 3, 2 / 3),
}
TWO = {
    "all-reduce": (1, 1),
    "broadcast": (1, 0),
    "gloo's broadcast": (1, 0),
    "all-gather": (1 / 2, 1 / 2),
    "reduce-scatter": (1 / 2, 1 / 2),
    "gloo's reduce-scatter": (1, 1),
    "all-to-all": (1 / 2, 1 / 2),
}


def bytes_sent() -> dict[str, float]:
    """What this host sends during each operation, over the bytes of the tensor."""
    join()
    tensor = torch.ones(SIZE // 4)
    found = {}
    for name, operation in OPERATIONS.items():
        collectives.barrier()
        before = int(SENT.read_text())
        operation(tensor)
        collectives.barrier()
        found[name] = (int(SENT.read_text()) - before) / SIZE
    return found


@pytest.mark.parametrize("expected", [TWO, THREE], ids=["two hosts", "three hosts"])
def test_each_host_sends_the_bytes_that_the_algorithm_says(expected: dict[str, tuple[float, ...]]) -> None:
    ranks = len(expected["all-reduce"])
    with hosts(ranks, None) as cluster:
        found = run_on(cluster, bytes_sent)
    for name, shares in expected.items():
        for rank, share in enumerate(shares):
            # 3 to 6 % of headers, what acknowledges the data that come in, and on a loaded machine what is sent again
            assert share <= found[rank][name] < 1.12 * share + 0.06, (name, rank)


def measured(sizes: tuple[int, ...], budget: float, what: tuple[str, ...]) -> list[PathResult]:
    torch.set_num_threads(1)
    return measure_hosts(sizes, budget, what)


def bus(result: PathResult, rate: str) -> float:
    """Bus bandwidth at the largest size, over the link's rate."""
    size, seconds = result.timings.sizes[-1], result.timings.seconds[-1]
    return 8 * bus_bandwidth(result.operation, result.ranks, size, seconds) / bits_of(rate)


Found: TypeAlias = dict[tuple[str, str, str], PathResult]
"""By operation, source and path."""


def fastest(
    cluster: Sequence[Host],
    rate: str,
    enough: Callable[[Found], bool],
    sizes: tuple[int, ...],
    budget: float,
    *what: str,
) -> Found:
    """The fastest of up to three measurements of each path, until it is enough: other programs can only slow one."""
    found: Found = {}
    for _ in range(3):
        for result in run_on(cluster, measured, sizes, budget, what)[0]:
            assert result.wrong is None
            key = result.operation, result.source, result.path
            if key not in found or bus(found[key], rate) < bus(result, rate):
                found[key] = result
        if enough(found):
            break
    return found


@pytest.mark.slow
def test_two_hosts_reach_the_rate_of_their_link_and_sizes_in_between_are_predicted() -> None:
    rate, fit, unseen = "200mbit", (1 << 20, 4 << 20), (2 << 20, 3 << 20)
    full = [(*path, "gloo") for path in (("copy", "node0"), ("copy", "node1"), ("all-reduce", ""), ("broadcast", ""))]

    def reached(found: Found) -> bool:
        return all(bus(found[path], rate) > 0.85 for path in full)

    def predicted(others: Found) -> bool:
        return all(
            seconds == pytest.approx(expected, rel=0.15)
            for path in full[2:]
            for timings in [found[path].timings]
            for size, seconds in zip(others[path].timings.sizes, others[path].timings.seconds, strict=True)
            for expected in (timings.latency + size / timings.bandwidth, seconds_at(timings, size))
        )

    with hosts(2, rate) as cluster:
        found = fastest(cluster, rate, reached, fit, 45.0, "links", "collectives")
        others = fastest(cluster, rate, predicted, unseen, 15.0, "collectives")
    for path in full:
        assert 0.85 < bus(found[path], rate) < 1.03, path
    assert bus(found["reduce-scatter", "", "gloo"], rate) < 0.55
    assert predicted(others), [(found[path].timings, others[path].timings) for path in full[2:]]


@pytest.mark.slow
def test_on_three_hosts_gloos_broadcast_sends_twice_over_one_link() -> None:
    rate, broadcast, all_reduce = "200mbit", ("broadcast", "", "gloo"), ("all-reduce", "", "gloo")
    with hosts(3, rate) as cluster:
        found = fastest(
            cluster, rate, lambda found: bus(found[all_reduce], rate) > 0.85, (4 << 20,), 15.0, "collectives"
        )
    assert bus(found[broadcast], rate) < 0.52
    assert 0.85 < bus(found[all_reduce], rate) < 1.03
