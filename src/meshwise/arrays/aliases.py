"""Write through views: arrays that share memory, as in NumPy.

The parts of most views are torch views of the parts of the original array. torch cannot express some views: entries in
descending order, or a `reshape` whose elements are on other devices. Such a view holds a copy. The copy is recomputed
when it is read after a write to the original array, and a write to the copy is written back to the original array. A
view keeps its original array alive.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from sys import getrefcount
from typing import Any

import torch
from torch import Tensor

from meshwise.arrays.array import Alias, Array, ViewedMemory, like
from meshwise.arrays.gathering import tell_return
from meshwise.arrays.moves import EXPLAINED, agreed, reshard
from meshwise.arrays.sharding import Shape
from meshwise.arrays.strides import Strides, is_descending, of, of_result

Rule = Callable[[Array], Array]
FOREIGN = ViewedMemory()
"""The memory of all arrays that come from other libraries. Any two of these arrays may share memory."""


def is_number(x: Array) -> bool:
    """Return whether `x` stands for a NumPy scalar, and not for a 0-d array."""
    return x.alias is None and not x.shape


def as_array_without_dims(x: Array) -> Array:
    """Return `x`. If `x` has no dims, mark it as a 0-d array instead of a scalar, so that `+=` changes it in place."""
    if is_number(x):
        x.alias = Alias(ViewedMemory())
    return x


def strides_of(x: Array) -> Strides:
    """Return the strides that NumPy would give `x`, in elements. None means row-major order."""
    return None if x.alias is None else x.alias.strides


def shown(x: Array) -> Alias:
    """Return the `Alias` of `x`, which describes how `x` shares memory with other arrays."""
    if x.alias is not None and x.alias.source is not None:
        fetched(x)  # may turn x into an array that owns its memory
    if x.alias is None:
        if any(map(_repeats, x.parts)):  # repeated elements share memory, so copy them
            x.parts = tuple(part.clone(memory_format=torch.contiguous_format) for part in x.parts)
        x.alias = Alias(ViewedMemory())
    return x.alias


def _repeats(part: Tensor) -> bool:
    return any(stride == 0 and length > 1 for stride, length in zip(part.stride(), part.shape, strict=True))


def viewed(
    x: Array,
    rule: Rule,
    strides: Strides,
    *,
    back: Rule | None = None,
    moves: str = "",
    read_only: bool = False,
    found: Array | None = None,
) -> Array:
    """Make a view of `x`: a write to the view changes `x`, and a write to `x` changes the view."""
    if is_number(x):  # scalars are immutable
        found = rule(copied(x))
        found.alias = Alias(ViewedMemory(), strides, read_only) if found.shape else None
        return found
    own = shown(x)
    found = rule(x) if found is None else found
    alias = found.alias = Alias(own.memory, strides, read_only or own.read_only)
    if back is not None or own.source is not None:
        alias.source, alias.rule, alias.back, alias.moves = x, rule, back, moves or own.moves
        alias.kept, alias.seen = found.parts, own.memory.writes
        del found.parts
    return found


def copied(x: Array) -> Array:
    """Return a copy of `x` in new memory, with the same layout."""
    return like(x, [part.clone(memory_format=torch.contiguous_format) for part in x.parts])


def fetched(x: Array) -> tuple[Tensor, ...]:
    """Return the parts of `x`, a view that torch cannot express.
    Recompute them if the original array has changed."""
    alias = x.alias
    if alias is None or alias.source is None or alias.rule is None:
        raise AttributeError("parts")
    if alias.seen != alias.memory.writes:
        alias.kept, alias.seen = alias.rule(alias.source).parts, alias.memory.writes
    kept = alias.kept
    if not (alias.moves and x.space.over_ranks) and is_last(x):
        _let_go(x)
    return kept


def is_last(x: Array) -> bool:
    """Return True if no other array in use shares memory with `x` and would see a write to `x`."""
    alias, aliases = x.alias, 1
    while alias is not None and alias.source is not None:
        if getrefcount(alias.source) > 2:  # the alias holds one reference, and getrefcount holds one
            return False
        alias, aliases = alias.source.alias, aliases + 1
    # Pass the attribute, not a local variable: from Python 3.14 on, a reference of a local may not be counted.
    return alias is None or getrefcount(alias.memory) == aliases + 1


def _let_go(x: Array) -> None:
    """Turn the view `x` into an array that owns its memory."""
    if x.alias is not None:
        x.parts, x.alias = x.alias.kept, Alias(ViewedMemory(), x.alias.strides, x.alias.read_only)


def writable(x: Array) -> tuple[Tensor, ...]:
    """Return the parts of `x` for writing. Raises ValueError if `x` is read-only."""
    alias = shown(x)
    if alias.read_only:
        raise ValueError(
            "assignment destination is read-only: it is a diagonal, or a broadcast array. Write x = x.copy() first."
        )
    if alias.moves and x.space.over_ranks and all(agreed(x.space, [int(is_last(x))], "view")):
        fetched(x)
        _let_go(x)
    parts = x.parts
    if x.alias is alias and alias.moves:
        tell_return(x, alias.moves)
    return parts


def written(x: Array) -> None:
    """After a write to the parts of `x`, make every array that shares memory with `x` show the new values."""
    alias = shown(x)
    if alias.source is None:
        alias.memory.writes += 1
        return
    if alias.back is None:
        written(alias.source)
    else:
        fill(alias.source, alias.back(x), "write through a view")
    alias.seen = alias.memory.writes


def fill(x: Array, values: Array, operation: str) -> None:
    """Overwrite the elements of `x` with the elements of `values`, an array of the same shape and dtype."""
    there = reshard(values, x.sharding, operation)
    for part, value in zip(writable(x), there.parts, strict=True):
        part.copy_(value)
    written(x)


def entangled(x: Array, other: object) -> bool:
    """Return whether `other` is an array that may share memory with `x`."""
    if not isinstance(other, Array) or other.alias is None:
        return False
    return other.alias.memory is FOREIGN or (x.alias is not None and other.alias.memory is x.alias.memory)


def apart(term: Any, target: Tensor) -> Any:
    """Return `term`, or a copy of `term` if its memory partly overlaps the memory of `target`."""
    meets = isinstance(term, Tensor) and not EXPLAINED and _meet(term, target) and not _same(term, target)
    return term.clone() if meets else term


def put(target: Tensor, value: Tensor) -> None:
    """Copy `value` to `target` in place."""
    if EXPLAINED:
        return
    if not _meet(value, target):
        target.copy_(value)
    elif not _same(value, target):
        target.copy_(value.clone())


def _meet(one: Tensor, other: Tensor) -> bool:
    (begin, end), (low, high) = _span(one), _span(other)
    return begin < high and low < end


def _same(one: Tensor, other: Tensor) -> bool:
    ours, theirs = (one.data_ptr(), one.shape, one.stride()), (other.data_ptr(), other.shape, other.stride())
    return ours == theirs and one.dtype is other.dtype


def _span(tensor: Tensor) -> tuple[int, int]:
    """Return the memory range of a tensor: (address of its first element, address after its last element)."""
    last = sum((length - 1) * stride for length, stride in zip(tensor.shape, tensor.stride(), strict=True))
    begin = tensor.data_ptr()
    return (begin, begin + (last + 1) * tensor.element_size()) if tensor.numel() else (0, 0)


def in_order_of(found: Array, operands: Sequence[Array]) -> Array:
    """Set the strides of `found` as NumPy would, from the memory order of the operands, and return `found`."""
    first = operands[0]
    if first.shape == found.shape and is_descending(first.shape, strides_of(first)):
        return found
    strides = of_result(found.shape, tuple(_seen(x, found.shape) for x in operands))
    if strides is not None:
        found.alias = Alias(ViewedMemory(), strides)
    return found


def in_order_left(found: Array, x: Array, axes: Collection[int], keepdims: bool) -> Array:
    """Give the result of a reduction the strides that NumPy would give it, and return the result."""
    if x.alias is None or x.alias.strides is None:
        return found
    own = [0 if dim in axes else stride for dim, stride in enumerate(x.alias.strides) if keepdims or dim not in axes]
    strides = of_result(found.shape, (tuple(own),))
    found.alias = found.alias if strides is None else Alias(ViewedMemory(), strides)
    return found


def _seen(x: Array, shape: Shape) -> tuple[int, ...]:
    """Return the strides of an operand after broadcasting to the result's shape. Repeated dims have stride 0."""
    strides = of(x.shape, strides_of(x))
    own = tuple(stride if length > 1 else 0 for length, stride in zip(x.shape, strides, strict=True))
    return (0,) * (len(shape) - len(own)) + own
