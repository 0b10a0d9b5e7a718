"""Compute algorithm and bus bandwidth, as nccl-tests define them.

Algorithm bandwidth is size over time. Bus bandwidth multiplies it so that it can be compared with the speed of one link
whatever the number of ranks: it is what a link carries when the ring, or the one sender, is the limit.
"""

from __future__ import annotations

from collections.abc import Callable

DEFINITIONS = "nccl-tests"
"""The source of these definitions, to be named beside the figures."""

# nccl-tests 2.19.6, `getBw` of src/*.cu; gather and scatter stand there and not in doc/PERFORMANCE.md. DeepSpeed counts
# an all-reduce's algorithm bandwidth twice, and gather and scatter with 1.
FACTORS: dict[str, Callable[[int], float]] = {
    "all-reduce": lambda ranks: 2 * (ranks - 1) / ranks,
    "all-gather": lambda ranks: (ranks - 1) / ranks,
    "reduce-scatter": lambda ranks: (ranks - 1) / ranks,
    "all-to-all": lambda ranks: (ranks - 1) / ranks,
    "gather": lambda ranks: (ranks - 1) / ranks,
    "scatter": lambda ranks: (ranks - 1) / ranks,
    "broadcast": lambda ranks: 1.0,
    "reduce": lambda ranks: 1.0,
    "send-receive": lambda ranks: 1.0,
}
"""For each collective, bus bandwidth over algorithm bandwidth. The size of all-reduce, broadcast, reduce, send-receive
(each rank sends to the next) is that of the tensor; of all others, that of the parts of all ranks together."""


def algorithm_bandwidth(size: int, seconds: float) -> float:
    """Return the size of the collective's data over its time, in bytes/s."""
    return size / seconds


def bus_factor(operation: str, ranks: int) -> float:
    """Return bus bandwidth over algorithm bandwidth. It is 1 for anything but a collective, such as a copy."""
    return FACTORS[operation](ranks) if operation in FACTORS else 1.0


def bus_bandwidth(operation: str, ranks: int, size: int, seconds: float) -> float:
    """Return the bytes/s on the busiest link, if the algorithm is optimal and does not reduce in the network."""
    return bus_factor(operation, ranks) * algorithm_bandwidth(size, seconds)
