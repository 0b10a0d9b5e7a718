"""Compute algorithm and bus bandwidth, as nccl-tests define them.

Algorithm bandwidth is the size of the data divided by the time. Bus bandwidth is algorithm bandwidth times a factor.
Bus bandwidth can be compared with the speed of one link for any number of ranks, since it is the load of the busiest
link if the algorithm is optimal.
"""

from __future__ import annotations

from collections.abc import Callable

DEFINITIONS = "nccl-tests"
"""The program whose definitions of bandwidth this file uses. Reports print its name beside every bandwidth."""

# From `getBw` in src/*.cu of nccl-tests 2.19.6, since doc/PERFORMANCE.md omits gather and scatter. DeepSpeed
# differs: it doubles the algorithm bandwidth of an all-reduce, and uses the factor 1 for gather and scatter.
FACTORS: dict[str, Callable[[int], float]] = {
    "all-reduce": lambda ranks: 2 * (ranks - 1) / ranks,
    **dict.fromkeys(
        ("all-gather", "reduce-scatter", "all-to-all", "gather", "scatter"), lambda ranks: (ranks - 1) / ranks
    ),
    **dict.fromkeys(("broadcast", "reduce", "send-receive"), lambda ranks: 1.0),
}
"""For each collective, bus bandwidth divided by algorithm bandwidth. Both count the bytes of one tensor for all-reduce,
broadcast, reduce and send-receive, and the bytes of all ranks' parts together for the other collectives."""


def bus_factor(operation: str, ranks: int) -> float:
    """Return the ratio of bus bandwidth to algorithm bandwidth. For an operation that is not a collective, it is 1."""
    return FACTORS[operation](ranks) if operation in FACTORS else 1.0


def bus_bandwidth(operation: str, ranks: int, size: int, seconds: float) -> float:
    """Return the bus bandwidth in bytes/s: the load of the busiest link if the collective's algorithm is optimal.

    The ranks are assumed to compute the sums. If the switch computes them (NVLS, SHARP), the links carry less than
    this.
    """
    return bus_factor(operation, ranks) * size / seconds
