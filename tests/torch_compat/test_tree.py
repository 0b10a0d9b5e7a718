"""Batches of any shape: every tensor is reached, and the rest stays what it was."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, UserDict
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.utils.rnn import pack_sequence

from meshwise.torch_compat.tree import leaves_of, map_leaves, map_tensors, tensors_in


class Pair(NamedTuple):
    """A batch with names."""

    x: Tensor
    y: Any


class Encoding(UserDict[str, Any]):
    """A mapping with methods of its own, as tokenizers give it."""

    def words(self) -> int:
        return len(self["ids"])


def negative(tree: Any) -> Any:
    return map_tensors(lambda tensor: -tensor, tree)


leaves = st.one_of(st.integers(1, 9).map(torch.tensor), st.none(), st.text(max_size=3), st.floats(0, 1))
trees = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.text(max_size=2), inner, max_size=3),
        st.builds(Pair, inner, inner),
    ),
    max_leaves=8,
)


def flat(tree: Any) -> list[Any]:
    """Leaves and types, depth first, by another route than map_tensors."""
    if isinstance(tree, dict):
        return [dict, *[x for key, item in tree.items() for x in (key, *flat(item))]]
    if isinstance(tree, (list, tuple)):
        return [type(tree), *[x for item in tree for x in flat(item)]]
    return [tree.item() if isinstance(tree, Tensor) else tree]


@given(trees)
def test_every_tensor_is_reached_once_and_nothing_else_changes(tree: Any) -> None:
    seen: list[Tensor] = []
    same = map_tensors(lambda tensor: seen.append(tensor) or tensor, tree)
    assert flat(same) == flat(tree)
    turned = flat(map_tensors(lambda tensor: tensor + 1000, tree))
    assert sum(isinstance(x, int) and x > 1000 for x in turned) == len(seen)
    assert [id(tensor) for tensor in tensors_in(tree)] == [id(tensor) for tensor in seen]


@pytest.mark.parametrize("kind", [dict, OrderedDict, Encoding])
def test_a_mapping_stays_of_its_kind_and_the_given_one_is_not_changed(kind: Any) -> None:
    given_ = kind({"ids": torch.tensor([1, 2]), "text": "ab"})
    found = negative(given_)
    assert type(found) is kind
    assert found["ids"].tolist() == [-1, -2] and found["text"] == "ab"
    assert given_["ids"].tolist() == [1, 2]
    if isinstance(found, Encoding):
        assert found.words() == 2


def test_named_tuples_keep_their_names() -> None:
    found = negative(Pair(torch.tensor(1), [torch.tensor(2)]))
    assert type(found) is Pair
    assert (found.x.item(), found.y[0].item()) == (-1, -2)


def test_a_packed_sequence_moves_and_its_batch_sizes_stay_on_the_cpu() -> None:
    sequences = [torch.ones(2), torch.ones(3)]
    for sort in (False, True):
        packed = pack_sequence(sorted(sequences, key=len, reverse=sort), enforce_sorted=sort)
        moved = map_tensors(lambda tensor: tensor.to("meta"), packed)
        assert type(moved) is type(packed)
        assert moved.data.device.type == "meta"
        assert moved.batch_sizes.equal(packed.batch_sizes)
        assert [t if t is None else t.device.type for t in moved[2:]] == ([None, None] if sort else ["meta", "meta"])


def test_sizes_and_strings_are_no_trees_of_tensors() -> None:
    tree = {"size": torch.Size([2, 3]), "name": "abc", "none": None}
    assert negative(tree) == tree
    assert list(tensors_in(tree)) == []


@dataclass(frozen=True)
class Sample:
    """A batch with fields, and what is no tensor."""

    x: Tensor
    more: dict[str, Any]


def test_a_dataclass_stays_of_its_kind_and_is_itself_where_nothing_changes() -> None:
    sample = Sample(torch.tensor(1), {"y": torch.tensor(2), "name": "a"})
    found = negative(sample)
    assert type(found) is Sample and (found.x.item(), found.more["y"].item(), found.more["name"]) == (-1, -2, "a")
    assert sample.x.item() == 1 and [tensor.item() for tensor in tensors_in(sample)] == [1, 2]
    same = Sample(torch.tensor(1), {})
    assert dataclasses.replace(same).more == {} and map_leaves(lambda item: item, same, lambda item: item == {}) is same


def test_the_output_of_a_transformers_model_is_a_tree() -> None:
    outputs = pytest.importorskip("transformers.modeling_outputs")
    given_ = outputs.CausalLMOutputWithPast(loss=torch.tensor(3.0), logits=torch.tensor([1.0, 2.0]))
    found = negative(given_)
    assert type(found) is type(given_)
    assert found.loss.item() == -3.0 and found["logits"].tolist() == [-1.0, -2.0] and found.past_key_values is None
    assert given_.loss.item() == 3.0
    assert [tensor.tolist() for tensor in tensors_in(given_)] == [3.0, [1.0, 2.0]]


def test_leaves_of_a_kind_are_found_before_what_is_inside_them() -> None:
    sample = Sample(torch.tensor(1), {})
    assert list(leaves_of(Sample, [{"a": sample}, 3])) == [sample]
