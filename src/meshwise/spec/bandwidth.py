"""Compute algorithm and bus bandwidth, as nccl-tests define them.

Algorithm bandwidth is size over time. Bus bandwidth multiplies it so that it can be compared with the speed of one link
whatever the number of ranks: it is what a link carries when the ring, or the one sender, is the limit.
"""

from __future__ import annotations

from collections.abc import Callable

DEFINITIONS = "nccl-tests"
"""The source of these definitions, for output that shows a figure."""

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
"""Bus over algorithm bandwidth by collective. Sizes: all-reduce, broadcast, reduce, send-receive (each rank sends to
the next) of the tensor; all others of the tensor of all ranks, count times ranks."""


def algorithm_bandwidth(size: int, seconds: float) -> float:
    """Return bytes a second: size over time."""
    return size / seconds


def bus_factor(operation: str, ranks: int) -> float:
    """Return bus over algorithm bandwidth. 1 for anything but a collective: a copy, or one-to-all by the bytes sent."""
    return FACTORS[operation](ranks) if operation in FACTORS else 1.0


def bus_bandwidth(operation: str, ranks: int, size: int, seconds: float) -> float:
    """Return bytes a second on the busiest link, for an optimal algorithm that does not reduce in the network."""
    return bus_factor(operation, ranks) * algorithm_bandwidth(size, seconds)
