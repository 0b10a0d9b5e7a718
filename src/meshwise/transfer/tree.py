"""Batches as trees: tensors inside tuples, lists, dicts, dataclasses and named tuples."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import copy as shallow_copy
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor
from torch.nn.utils.rnn import PackedSequence


def map_tensors(function: Callable[[Tensor], Tensor], tree: Any) -> Any:
    """`tree` with `function` applied to every tensor in it; anything else stays as it is."""
    return map_leaves(function, tree, lambda leaf: False)


def map_leaves(function: Callable[[Any], Any], tree: Any, also: Callable[[Any], bool]) -> Any:
    """`tree` with `function` applied to every tensor in it, and to what else `also` says is a leaf of its kind."""

    def mapped(item: Any) -> Any:
        return map_leaves(function, item, also)

    if isinstance(tree, Tensor):
        return function(tree)
    if isinstance(tree, PackedSequence):  # its batch sizes have to stay on the CPU
        return PackedSequence(
            function(tree.data), tree.batch_sizes, mapped(tree.sorted_indices), mapped(tree.unsorted_indices)
        )
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(mapped(item) for item in tree))
    if isinstance(tree, (list, tuple)):
        return type(tree)(mapped(item) for item in tree)
    if type(tree) is dict:
        return {key: mapped(item) for key, item in tree.items()}
    if isinstance(tree, Mapping):  # transformers' BatchEncoding and the like
        copy = tree.copy() if hasattr(tree, "copy") else dict(tree)
        for key, item in tree.items():
            copy[key] = mapped(item)
        return copy
    if also(tree):
        return function(tree)
    return _with_fields(tree, mapped) if is_dataclass(tree) and not isinstance(tree, type) else tree


def _with_fields(tree: Any, mapped: Callable[[Any], Any]) -> Any:
    """A dataclass of the same kind with its fields mapped; itself where nothing in it changed, frozen ones too."""
    new = {field.name: mapped(getattr(tree, field.name)) for field in fields(tree)}
    if all(value is getattr(tree, name) for name, value in new.items()):
        return tree
    other = shallow_copy(tree)
    for name, value in new.items():
        object.__setattr__(other, name, value)
    return other


def first_tensor(tree: Any) -> Tensor | None:
    """The first tensor of `tree`, depth first."""
    found: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    map_tensors(note, tree)
    return found[0] if found else None
