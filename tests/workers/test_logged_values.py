"""Ranks that log other values are told so, once a line."""

from __future__ import annotations

import math

from meshwise.workers.logged_values import LoggedValues


def test_a_value_of_a_part_of_the_batch_is_told_with_its_line() -> None:
    logged = LoggedValues()
    assert logged.add(1, "train.py:31", 1, {"lr": 0.1, "loss": 0.61, "accuracy": 0.5}) == ""
    said = logged.add(0, "train.py:31", 1, {"lr": 0.1, "loss": 0.5, "accuracy": 0.25})
    assert said == (
        "train.py:31: mw.log gets loss 0.5 on rank 0 and 0.61 on rank 1 (accuracy too), but writes only rank 0's. "
        "It depends on the rank's own samples. Log what mw.backward returns, or mw.sum(total) / mw.sum(count)."
    )
    assert logged.add(2, "train.py:31", 1, {"loss": 0.7}) == ""  # once a line
    assert logged.add(0, "train.py:40", 1, {"loss": 1.0}) == ""
    assert "train.py:40" in logged.add(1, "train.py:40", 1, {"loss": 2.0})


def test_what_is_the_same_or_of_one_rank_is_nobodys_mistake() -> None:
    logged = LoggedValues()
    for rank in range(3):
        assert logged.add(rank, "a.py:1", 1, {"loss": 0.1 + 1e-9 * rank, "none": math.nan}) == ""
        assert logged.add(rank, "a.py:1", 1 + rank, {f"of rank {rank}": rank}) == ""
        assert logged.add(0, "a.py:2", rank, {"loss": rank}) == ""
