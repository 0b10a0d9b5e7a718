"""What has no rule gathers, and says so."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest

import meshwise as mw
from meshwise.arrays.gathering import WITHOUT_RULE, GatherWarning, gathered, placed_as

XP = mw.array_namespace("3xcpu")


def test_an_operation_without_a_rule_is_told_once() -> None:
    x = XP.arange(7)
    with pytest.warns(GatherWarning, match="flipped cannot run on the shards .* it gathers 32 B on one"):
        whole = gathered(x, "flipped")
    back = placed_as(whole.parts[0].flip(0), 0, x.space, x.sharding, "flipped")
    assert back.numpy().tolist() == [6, 5, 4, 3, 2, 1, 0]
    assert back.sharding == x.sharding
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        gathered(x, "flipped")


def test_the_docs_list_what_has_no_rule() -> None:
    text = Path(__file__).parents[2].joinpath("docs/arrays.md").read_text()
    assert WITHOUT_RULE
    assert [name for name in WITHOUT_RULE if f"`{name}`" not in text] == []


def test_guard_forbids_it() -> None:
    with (
        mw.guard("error"),
        pytest.raises(mw.UsageError, match=r"negated cannot run on the shards .* gathers 32 B, which mw.guard"),
    ):
        gathered(XP.arange(7), "negated")
    with mw.guard("error"):
        gathered(XP.arange(7, device="cpu:1"), "negated")  # it lies on one place
    with mw.guard("allow"):
        gathered(XP.arange(7), "negated")
    with pytest.raises(mw.UsageError, match="Use one of warn, error, allow"), mw.guard("forbid"):
        pass
