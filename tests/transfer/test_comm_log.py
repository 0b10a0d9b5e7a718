"""The log of transfers: nothing without an open one, nested ones get all, seconds are read after the block."""

from __future__ import annotations

import math

import pytest

from meshwise.transfer import comm_log as module
from meshwise.transfer.comm_log import Transfer, comm_log, note, totals


def test_without_an_open_log_nothing_is_kept() -> None:
    note("copy", "host", "cuda:0", 8, "direct", 1e-3)
    with comm_log() as log:
        pass
    assert list(log) == [] and str(log) == "nothing was moved"
    assert module.OPEN == []


def test_a_log_lists_what_began_in_its_block_and_nested_ones_get_all() -> None:
    with comm_log() as outer:
        note("copy", "host", "cuda:0", 1000, "direct", 1e-3)
        with comm_log() as inner:
            note("all-reduce", "rank 0", "2 ranks", 2000, "gloo", 2e-3)
        note("copy", "cuda:0", "cuda:1", 3000, "peer", 3e-3)
    note("copy", "host", "cuda:0", 1, "direct", 1.0)
    assert list(inner) == [Transfer("all-reduce", "rank 0", "2 ranks", 2000, "gloo", 2e-3)]
    assert [move.bytes for move in outer] == [1000, 2000, 3000]
    assert outer[-1].path == "peer" and [move.path for move in outer[:2]] == ["direct", "gloo"]


def test_a_log_is_closed_when_its_block_fails() -> None:
    with pytest.raises(ZeroDivisionError), comm_log() as log:
        note("copy", "host", "host", 1, "direct", 0.5)
        raise ZeroDivisionError
    assert module.OPEN == [] and len(log) == 1


def test_seconds_that_must_be_waited_for_are_read_once_and_only_after_the_block() -> None:
    waits: list[int] = []

    def wait() -> float:
        waits.append(1)
        return 0.25

    with comm_log() as log:
        note("copy", "cuda:0", "cuda:1", 10, "peer", wait)
        assert math.isnan(log[0].seconds) and waits == []
        assert "unknown" in str(log) and waits == []
    assert waits == []
    assert log[0].seconds == log[-1].seconds == 0.25
    assert waits == [1]


def test_totals_are_by_path_and_the_table_shows_rates() -> None:
    with comm_log() as log:
        note("copy", "cuda:0", "cuda:1", 10_000_000, "peer", 1e-3)
        note("copy", "cuda:1", "cuda:0", 30_000_000, "peer", 3e-3)
        note("copy", "host", "cuda:0", 1024, "direct", 1e-3)
    assert totals(log) == {"peer": (2, 40_000_000, 4e-3), "direct": (1, 1024, 1e-3)}
    lines = str(log).splitlines()
    assert lines[0].split() == ["operation", "from", "to", "bytes", "path", "time", "rate"]
    assert lines[1].split() == ["copy", "cuda:0", "cuda:1", "9.5", "MiB", "peer", "1.0", "ms", "10.00", "GB/s"]
    assert lines[4].split() == ["2", "in", "all", "38.1", "MiB", "peer", "4.0", "ms", "10.00", "GB/s"]
