"""Batches as trees: tensors inside tuples, lists, dicts and dataclass-like named tuples."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor
from torch.nn.utils.rnn import PackedSequence


def map_tensors(function: Callable[[Tensor], Tensor], tree: Any) -> Any:
    """`tree` with `function` applied to every tensor in it; anything else stays as it is."""
    if isinstance(tree, Tensor):
        return function(tree)
    if isinstance(tree, PackedSequence):  # its batch sizes have to stay on the CPU
        indices = map_tensors(function, (tree.sorted_indices, tree.unsorted_indices))
        return PackedSequence(function(tree.data), tree.batch_sizes, *indices)
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(map_tensors(function, item) for item in tree))
    if isinstance(tree, (list, tuple)):
        return type(tree)(map_tensors(function, item) for item in tree)
    if type(tree) is dict:
        return {key: map_tensors(function, item) for key, item in tree.items()}
    if isinstance(tree, Mapping):  # transformers' BatchEncoding and the like
        copy = tree.copy() if hasattr(tree, "copy") else dict(tree)
        for key, item in tree.items():
            copy[key] = map_tensors(function, item)
        return copy
    return tree


def first_tensor(tree: Any) -> Tensor | None:
    """The first tensor of `tree`, depth first."""
    found: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    map_tensors(note, tree)
    return found[0] if found else None
