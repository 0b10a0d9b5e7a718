"""Map and list the tensors inside nested containers.

Containers are tuples, lists, dicts and other mappings, dataclasses and named tuples.

torch's own `_pytree` is private, and treats dataclasses, mappings such as the batches of tokenizers, and subclasses of
lists as leaves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy as shallow_copy
from dataclasses import fields, is_dataclass
from typing import Any, TypeVar

from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

T = TypeVar("T")
Build = Callable[[list[Any]], Any]
"""A function that makes a copy of one container, such as a dict, with a given list of values instead of its own."""


def map_tensors(function: Callable[[Tensor], Any], tree: Any) -> Any:
    """Return `tree` with `function(tensor)` in place of every tensor; anything else stays as it is."""
    return map_kind(Tensor, function, tree)


def map_kind(kind: type | tuple[type, ...], function: Callable[[Any], Any], tree: Any) -> Any:
    """Return `tree` with `function(item)` in place of every item of this type; anything else stays as it is."""
    return map_leaves(function, tree, lambda item: isinstance(item, kind))


def map_leaves(function: Callable[[Any], Any], tree: Any, is_leaf: Callable[[Any], bool]) -> Any:
    """Return `tree` with `function(item)` in place of every item for which `is_leaf(item)` is true. The rest stays as
    it is."""
    if is_leaf(tree):
        return function(tree)
    parts, build = _opened(tree)
    return build([map_leaves(function, part, is_leaf) for part in parts]) if build is not None else tree


def leaves_of(kind: type[T], tree: Any) -> Iterator[T]:
    """Yield every item of this type in `tree`, depth first."""
    if isinstance(tree, kind):
        yield tree
    else:
        for part in _opened(tree)[0]:
            yield from leaves_of(kind, part)


def all_leaves(tree: Any) -> Iterator[Any]:
    """Yield everything in `tree` that is not a container, depth first."""
    parts, build = _opened(tree)
    if build is None:
        yield tree
    for part in parts:
        yield from all_leaves(part)


def tensors_in(tree: Any) -> Iterator[Tensor]:
    """Yield every tensor in `tree`, depth first."""
    return leaves_of(Tensor, tree)


def _opened(tree: Any) -> tuple[Sequence[Any], Build | None]:
    """Return a container's parts, and a function that makes such a container from new parts.
    ((), None) for a leaf."""
    if isinstance(tree, PackedSequence):  # its batch sizes must stay on the CPU
        parts = [tree.data, tree.sorted_indices, tree.unsorted_indices]
        return parts, lambda new: PackedSequence(new[0], tree.batch_sizes, *new[1:])
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return tree, lambda new: type(tree)(*new)
    if isinstance(tree, list | tuple):
        return tree, type(tree)
    if isinstance(tree, Mapping):
        return list(tree.values()), lambda new: _like_mapping(tree, new)
    if is_dataclass(tree) and not isinstance(tree, type):
        return [getattr(tree, field.name) for field in fields(tree)], lambda new: _with_fields(tree, new)
    return (), None


def _like_mapping(tree: Mapping[Any, Any], values: list[Any]) -> Any:
    """Return a copy of a mapping with new values."""
    copy: Any = tree.copy() if hasattr(tree, "copy") else dict(tree)
    for key, value in zip(tree, values, strict=True):
        copy[key] = value
    return copy


def _with_fields(tree: Any, values: list[Any]) -> Any:
    """Return a copy of a dataclass, frozen or not, with new field values. Return `tree` itself if none has changed."""
    changed = [(f.name, new) for f, new in zip(fields(tree), values, strict=True) if new is not getattr(tree, f.name)]
    other = shallow_copy(tree) if changed else tree
    for name, value in changed:
        object.__setattr__(other, name, value)
    return other
