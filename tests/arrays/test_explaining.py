"""What an operation would move is known from shapes, before it runs."""

from __future__ import annotations

import pytest

import meshwise as mw

XP = mw.array_namespace("2xcpu")


def test_what_would_move_is_what_moves_and_a_better_placement_is_named() -> None:
    x, y = XP.ones((100, 4)), XP.ones((100, 4), sharding=XP.shard(1))
    before = x.parts
    found = mw.explain(lambda: x + y)
    assert x.parts is before
    with mw.comm_log() as log:
        x + y
    told = [(move.operation, move.source, move.target, move.bytes, move.path) for move in found.moves]
    assert told == [(move.operation, move.source, move.target, move.bytes, move.path) for move in log]
    assert found.bytes == 1600
    assert found.better[0].bytes == 0
    assert found.better[0].memory == 6400
    assert "0 B with x dim " in str(found)


def test_of_what_moves_nothing_nothing_is_better() -> None:
    x = XP.ones(6)
    found = mw.explain(lambda: x * 2 + x)
    assert (found.bytes, found.better) == (0, [])
    assert str(found) == "nothing was moved"


def test_what_reads_values_cannot_be_explained() -> None:
    x = XP.ones(6)
    with pytest.raises(mw.UsageError, match="this function reads values"):
        mw.explain(lambda: float(x.sum()))
    with pytest.raises(mw.UsageError, match="this function reads values"):
        mw.explain(lambda: XP.unique_values(x))
    with pytest.raises(ValueError, match="do not broadcast"):
        mw.explain(lambda: x + XP.ones(5))
    assert float(x.sum()) == 6
    with pytest.raises(mw.UsageError, match="the function must use an array"):
        mw.explain(lambda: 3)
