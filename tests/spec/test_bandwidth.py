"""Bandwidths by nccl-tests' definitions; the expected numbers are from its code (`getBw` of src/*.cu), by hand."""

from __future__ import annotations

import pytest

from meshwise.spec.bandwidth import bus_bandwidth, bus_factor


@pytest.mark.parametrize(
    ("operation", "two", "eight"),
    [
        ("all-reduce", 1.0, 1.75),
        ("all-gather", 0.5, 0.875),
        ("reduce-scatter", 0.5, 0.875),
        ("all-to-all", 0.5, 0.875),
        ("gather", 0.5, 0.875),
        ("scatter", 0.5, 0.875),
        ("broadcast", 1.0, 1.0),
        ("reduce", 1.0, 1.0),
        ("send-receive", 1.0, 1.0),
        ("copy", 1.0, 1.0),
        ("one-to-all", 1.0, 1.0),
    ],
)
def test_the_factor_of_each_operation(operation: str, two: float, eight: float) -> None:
    assert (bus_factor(operation, 2), bus_factor(operation, 8)) == (two, eight)


def test_a_ring_all_reduce_at_link_speed_has_the_links_bandwidth() -> None:
    link, ranks, size = 25e9, 8, 1 << 30
    seconds = 2 * (ranks - 1) * (size / ranks) / link  # a ring sends 2 (n - 1) parts of a n-th of the tensor
    assert bus_bandwidth("all-reduce", ranks, size, seconds) == pytest.approx(link)
