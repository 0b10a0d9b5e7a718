"""Find which memory an operator reads and writes, by its schema.

Collectives of `c10d` say nothing of that in their schema; the names of their arguments do. Read in torch 2.11, 2.13 and
2.15: `native_functions.yaml`, `csrc/distributed/c10d/Ops.cpp`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from meshwise.compat.dispatch import operator_name
from meshwise.compat.tree import tensors_in

try:
    from torch.utils._python_dispatch import is_traceable_wrapper_subclass
except ImportError as error:  # pragma: no cover - no such torch is in range
    raise RuntimeError(f"torch {torch.__version__} has no wrapper subclasses. Use torch 2.11 to 2.15.") from error

NOTHING = {"empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided", "record_stream", "is_pinned"}
NOTHING |= {"barrier", "monitored_barrier_", "wait_tensor", "_wrap_tensor_autograd"}
SENDS = {"send", "reduce_"}


def has_parts(args: Any, kwargs: Any) -> bool:
    """Return whether an argument is a wrapper subclass, such as a DTensor. torch then calls the operator again on the
    tensors inside the wrapper."""
    return any(is_traceable_wrapper_subclass(tensor) for tensor in tensors_in((args, list(kwargs.values()))))


def is_collective(operator: Any) -> bool:
    """Return whether the operator exchanges data between processes."""
    return str(operator._schema.name).startswith(("c10d::", "_c10d_functional::"))


def touched(operator: Any, args: Any, kwargs: dict[str, Any], result: Any) -> Iterator[tuple[Tensor, bool]]:
    """Yield (tensor, written) for each tensor in an operator call. `written` is True if the operator writes the
    tensor's memory, and False if it only reads the memory. Tensors without storage are skipped."""
    yield from (each for each in _touched(operator, args, kwargs, result) if _storage(each[0]))


def _touched(operator: Any, args: Any, kwargs: dict[str, Any], result: Any) -> Iterator[tuple[Tensor, bool]]:
    name, schema = operator_name(operator), operator._schema
    if name in NOTHING or torch.Tag.inplace_view in operator.tags:
        return
    collective = schema.name.startswith("c10d::")
    made = [] if collective else list(_made(schema, result))
    own = {_storage(tensor) for tensor in tensors_in((args, list(kwargs.values())))} if made else set()
    of_torch = schema.name.startswith("aten::")
    yield from ((tensor, True) for tensor in made if _storage(tensor) not in own or not of_torch)
    asks_the_shape = name.endswith("_like") or name.startswith("new_")
    asks_the_shape |= of_torch and any(_storage(tensor) in own for tensor in made)  # a view that does not say so
    named = dict(zip((argument.name for argument in schema.arguments), args, strict=False)) | kwargs
    for argument in schema.arguments:
        alias = argument.alias_info
        writes = alias is not None and alias.is_write
        if collective:
            writes = not argument.name.startswith("input") and name not in SENDS
        if writes or collective or (alias is None and not asks_the_shape):
            yield from ((tensor, writes) for tensor in tensors_in(named.get(argument.name)))


def _made(schema: Any, result: Any) -> Iterator[Tensor]:
    """Yield the results of an operator that are new tensors according to its schema, not arguments or views of them."""
    for returned, value in zip(schema.returns, result if len(schema.returns) > 1 else (result,), strict=False):
        if returned.alias_info is None:
            yield from tensors_in(value)


def _storage(tensor: Tensor) -> int:
    holds_others: bool = is_traceable_wrapper_subclass(tensor)
    if holds_others:
        return 0
    try:
        return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):  # as a sparse tensor
        return 0
