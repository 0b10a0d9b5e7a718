"""Units read as people write them, on both sides of every change of unit."""

import math

import pytest

from meshwise.spec.units import bandwidth_text, bytes_text, count_text, flops_text, seconds_text


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (512, "512 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1536, "1.5 KiB"),
        (1024**2 - 1, "1.0 MiB"),
        (61.2 * 1024**3, "61.2 GiB"),
        (1024**5 * 5000, "5000.0 PiB"),
        (-2048, "-2.0 KiB"),
        (math.nan, "unknown"),
        (math.inf, "unknown"),
    ],
)
def test_bytes_change_unit_at_1024(count: float, text: str) -> None:
    assert bytes_text(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (85e-6, "85 µs"),
        (0.00099949, "999 µs"),
        (0.0009996, "1.0 ms"),
        (0.0034, "3.4 ms"),
        (0.412, "412 ms"),
        (0.99949, "999 ms"),
        (0.9996, "1.0 s"),
        (3.2, "3.2 s"),
        (59.94, "59.9 s"),
        (59.96, "1 min 00 s"),
        (125, "2 min 05 s"),
        (3599.4, "59 min 59 s"),
        (3599.6, "1 h 00 min"),
        (3725, "1 h 02 min"),
        (-0.412, "-412 ms"),
        (math.inf, "unknown"),
        (math.nan, "unknown"),
    ],
)
def test_seconds_are_written_in_the_unit_that_fits(seconds: float, text: str) -> None:
    assert seconds_text(seconds) == text


@pytest.mark.parametrize(("count", "text"), [(0, "0"), (12_300, "12,300"), (12_299.6, "12,300"), (math.inf, "unknown")])
def test_counts_are_grouped_in_thousands(count: float, text: str) -> None:
    assert count_text(count) == text


@pytest.mark.parametrize(
    ("rate", "text"),
    [
        (0, "0 B/s"),
        (812e6, "812 MB/s"),
        (55.43e9, "55.4 GB/s"),
        (3.35e12, "3.35 TB/s"),
        (999.6e6, "1.00 GB/s"),
        (9.996e9, "10.0 GB/s"),
        (4.5e15, "4500 TB/s"),
        (math.inf, "unknown"),
    ],
)
def test_bandwidth(rate: float, text: str) -> None:
    assert bandwidth_text(rate) == text


def test_flops() -> None:
    told = [flops_text(rate) for rate in (989.5e12, 1.979e15, 95.2e9)]
    assert told == ["990 TFLOP/s", "1.98 PFLOP/s", "95.2 GFLOP/s"]
