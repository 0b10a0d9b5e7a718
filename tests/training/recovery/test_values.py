"""The state as plain values and named tensors goes through JSON unchanged, and holds no code."""

from __future__ import annotations

import json
import math
from collections import Counter, OrderedDict
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from meshwise.spec.errors import UsageError
from meshwise.training.recovery.values import decoded, encoded, merged

KEYS = st.one_of(st.text(max_size=3), st.integers(), st.booleans(), st.tuples(st.integers(), st.text(max_size=2)))
ATOMS = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(), st.binary(), st.complex_numbers())
TREES = st.recursive(
    ATOMS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(KEYS, inner, max_size=3),
        st.dictionaries(KEYS, inner, max_size=3).map(OrderedDict),
    ),
)


def through(tree: Any) -> Any:
    values, tensors = encoded(tree)
    return decoded(json.loads(json.dumps(values, allow_nan=False)), tensors.__getitem__)


@given(TREES)
def test_every_tree_of_plain_values_comes_back_as_it_was(tree: Any) -> None:
    found = through(tree)
    assert repr(found) == repr(tree) and type(found) is type(tree)


@pytest.mark.parametrize(
    "value",
    [
        Counter({3: 2, 9: 1}),
        {1, 2, 3},
        torch.Size([2, 3]),
        torch.float16,
        torch.device("cpu"),
        np.float32(0.1),
        np.int64(2**60),
        {"$tensor": "no tensor, a user's key"},
        {1: "a", "1": "b"},
        -math.inf,
    ],
)
def test_other_plain_values_come_back_as_they_were(value: Any) -> None:
    found = through(value)
    assert found == value and type(found) is type(value)


def test_tensors_are_named_by_their_place_and_tied_ones_stay_tied() -> None:
    one, other = torch.ones(2), torch.zeros(3)
    tree = {"model": {"a.b": one, "c/d": other}, "again": (one,), "state": {1: other, "1": one.clone()}}
    values, tensors = encoded(tree)
    assert list(tensors) == ["model/a.b", "model/c%2Fd", "state/1"]
    back = decoded(values, tensors.__getitem__)
    assert back["again"][0] is back["model"]["a.b"] is one
    assert back["state"][1] is other and back["state"]["1"] is tensors["state/1"]


def test_two_tensors_of_one_place_have_two_names() -> None:
    _, tensors = encoded({1: torch.ones(1), "1": torch.zeros(1)})
    assert list(tensors) == ["1", "1'"]


def test_what_is_no_plain_value_is_told_with_its_place() -> None:
    with pytest.raises(UsageError, match=r"scheduler\.fn is a builtins\.function\. A checkpoint can store"):
        encoded({"scheduler": {"fn": lambda step: step}})


def test_what_one_rank_lacks_comes_from_the_first_that_has_it() -> None:
    ranks = [{"state": {}, "lr": 1}, {"state": {2: {"n": 5}}, "lr": 9}, {"state": {0: {"n": 4}, 2: {"n": 6}}, "lr": 7}]
    found = decoded(merged([encoded(rank)[0] for rank in ranks]), lambda name: None)
    assert found == {"state": {0: {"n": 4}, 2: {"n": 5}}, "lr": 1} and list(found["state"]) == [0, 2]
