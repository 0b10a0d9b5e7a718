"""What has no rule gathers, and says so."""

from __future__ import annotations

import warnings

import pytest
import torch

import meshwise as mw
from meshwise.arrays.gathering import WITHOUT_RULE, GatherWarning, on_one_place

XP = mw.array_namespace("3xcpu")


def test_an_operation_without_a_rule_is_right_and_told_once() -> None:
    reversed_rows = on_one_place("flipped", lambda x: (x.flip(0), x.sum()))
    assert "flipped" in WITHOUT_RULE
    x = XP.arange(7)
    with pytest.warns(GatherWarning, match="flipped has no rule .* it gathers 32 B on one"):
        first, added = reversed_rows(x)
    assert first.numpy().tolist() == [6, 5, 4, 3, 2, 1, 0]
    assert first.sharding == x.sharding
    assert int(added) == 21
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        reversed_rows(x)


def test_guard_forbids_it() -> None:
    rule = on_one_place("negated", torch.neg)
    with mw.guard("error"), pytest.raises(mw.UsageError, match=r"negated has no rule .* gathers 32 B, which mw.guard"):
        rule(XP.arange(7))
    with mw.guard("error"):
        rule(XP.arange(7, device="cpu:1"))  # it lies on one place
    with mw.guard("allow"):
        rule(XP.arange(7))
    with pytest.raises(mw.UsageError, match="Use one of warn, error, allow"), mw.guard("forbid"):
        pass
