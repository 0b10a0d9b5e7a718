"""Operators that make something of several samples of a batch: a loss that compares samples with each other.

A tensor with two dims that both grow with the rank's rows holds pairs. Outside of the model, what is summed over the
rows and is no single number is a statistic of the batch; what is sorted, picked or moved along them compares samples.
Of one forward alone that may be chance (as many features as samples); of the same call in two with other numbers of
samples it is not.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from meshwise.compat.dispatch import intercept_operators, named_arguments, operator_name
from meshwise.spec.user_code import user_place

Dims = tuple[tuple[int, float], ...]
"""Dims of a tensor that are multiples of the rows, and how often each has them."""
Pairs = dict[tuple[str, int, Dims, int], str]
"""(operator, number of its call, dims of what it gives, rows) -> where it stands in the program."""


STATISTIC = -1  # in the place of a dim
OVER_ROWS = {"mean", "sum", "logsumexp", "linalg_vector_norm", "amax", "amin", "prod"}
SPREAD = {"var", "std", "var_mean", "std_mean"}  # of one number too
CURVED = {"sqrt", "rsqrt", "log", "pow"}  # of a mean over samples: no mean over samples
ALONG_ROWS = {"topk", "sort", "kthvalue", "median", "max", "min", "roll", "flip"}
TOGETHER = OVER_ROWS | SPREAD | CURVED | ALONG_ROWS | {"mm", "index"}


def noting_pairs(rows: int, found: Pairs, in_model: Callable[[], bool]) -> AbstractContextManager[Any]:
    """In the with-body operators go into `found` that give something with two dims that are multiples of `rows`, or,
    outside of the model, a statistic of the batch."""
    calls: Counter[str] = Counter()

    def note(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result, name = operator(*args, **kwargs), operator_name(operator)
        if rows > 1 and isinstance(result, Tensor) and result.dim() > 1:
            calls[name] += 1
            dims = tuple((d, size / rows) for d, size in enumerate(result.shape) if size and size % rows == 0)
            if len(dims) > 1:
                found.setdefault((name, calls[name], dims, rows), user_place())
        if rows > 1 and name in TOGETHER and not in_model() and args and isinstance(args[0], Tensor):
            calls[f"{name} of rows"] += 1
            if name in CURVED and args[0].is_floating_point() and args[0].dim() == 0:
                found.setdefault((name, calls[f"{name} of rows"], ((STATISTIC, 0.0),), rows), user_place())
            if size := _rows_taken_together(name, args[0], result, named_arguments(operator, args, kwargs), rows):
                key = name, calls[f"{name} of rows"], ((STATISTIC, size / rows),), rows
                found.setdefault(key, user_place())
        return result

    return intercept_operators(note)


def _rows_taken_together(name: str, tensor: Tensor, result: Any, given: dict[str, Any], rows: int) -> int:
    """How many rows of a tensor, some times `rows`, an operator takes together, but to one sum; else 0."""
    if not tensor.is_floating_point() or tensor.dim() == 0:
        return 0
    size = len(tensor)
    if name == "mm":
        size = given["mat2"].size(0)
        taken = all(each % rows for each in result.shape)
    elif name in SPREAD or name in OVER_ROWS:
        dims = given.get("dim")
        dims = list(range(tensor.dim())) if dims in (None, []) else [dims] if isinstance(dims, int) else dims
        number = isinstance(result, Tensor) and result.numel() == 1
        taken = any(dim % tensor.dim() == 0 for dim in dims) and (name in SPREAD or not number)
    elif name in ALONG_ROWS:
        dims = given.get("dims", given.get("dim", -1))
        taken = any(dim % tensor.dim() == 0 for dim in ([dims] if isinstance(dims, int) else dims))
        taken &= "dim" in given or "dims" in given
    else:
        indices = given.get("indices") or ()
        taken = [(each.dtype, each.numel()) for each in indices if each is not None] == [(torch.int64, size)]
    return size if taken and size % rows == 0 else 0


def pairs_of_both(one: Pairs, rank: Pairs) -> list[str]:
    """Where both sides do, of other numbers of rows, in the order of one device, and what."""
    rows: dict[Any, set[int]] = {}
    for *call, count in rank:
        rows.setdefault(tuple(call), set()).add(count)
    both = [(key, place) for key, place in one.items() if place and rows.get(key[:3], set()) - {key[3]}]
    return [
        f"{place} takes several samples of a batch together ({name})"
        if dims[0][0] == STATISTIC
        else f"{place} compares the samples of a batch with each other"
        for (name, _, dims, _), place in both
    ]
