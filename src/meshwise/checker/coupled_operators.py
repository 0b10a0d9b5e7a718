"""Detect operators that combine several samples of a batch.

A loss that compares samples with each other uses such operators.

A tensor with two dimensions that both grow with the number of rows holds pairs of samples. A sum over rows that is not
a single number is a statistic of the batch. Sorting, indexing or moving along rows compares samples. It is no chance if
the same call does it with another number of samples.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from meshwise.spec.user_code import user_place
from meshwise.torch_compat.dispatch import intercept_operators, named_arguments, operator_name

Dims = tuple[tuple[int, float], ...]
"""Pairs (dimension, factor): this dimension of a tensor is `factor` times as long as the batch."""
Coupled = dict[tuple[str, str | None, int, Dims, int], str]
"""Maps a call to its source line. The key is (operator, module or None outside of the model, number of the call,
dimensions of the result, number of samples in the batch)."""


STATISTIC = -1  # used in place of a dim if the operator computes a statistic
OVER_ROWS = {"mean", "sum", "logsumexp", "linalg_vector_norm", "amax", "amin", "prod"}
SPREAD = {"var", "std", "var_mean", "std_mean"}  # these combine rows even if they return a single number
STATISTICS = SPREAD | {"mean", "sum"}
CURVED = {"sqrt", "rsqrt", "log", "pow"}  # not linear: f(mean over samples) is not the mean of f over samples
ALONG_ROWS = {"topk", "sort", "kthvalue", "median", "max", "min", "roll", "flip"}
_TOGETHER = OVER_ROWS | SPREAD | CURVED | ALONG_ROWS | {"mm", "index"}


@dataclass(frozen=True)
class Together:
    """An operator that combines several samples of a batch, such as a mean over the batch."""

    operator: str
    module: str | None
    text: str


def noting_coupled(rows: int, found: Coupled, module: Callable[[], str | None]) -> AbstractContextManager[Any]:
    """Record in `found` the operators inside the with block that may combine samples."""
    calls: Counter[tuple[str, str | None]] = Counter()

    def note(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result, name, within = operator(*args, **kwargs), operator_name(operator), module()
        calls[name, within] += 1
        taken = list[Dims]()
        if rows > 1 and isinstance(result, Tensor) and result.dim() > 1:
            dims = tuple((d, size / rows) for d, size in enumerate(result.shape) if size and size % rows == 0)
            taken += [dims] if len(dims) > 1 else []
        if rows > 1 and name in _TOGETHER and args and isinstance(args[0], Tensor):
            size = _rows_taken_together(name, args[0], result, named_arguments(operator, args, kwargs), rows)
            curved = within is None and name in CURVED and args[0].is_floating_point() and args[0].dim() == 0
            taken += [((STATISTIC, size / rows),)] if size or curved else []
        for dims in taken:
            found.setdefault((name, within, calls[name, within], dims, rows), user_place())
        return result

    return intercept_operators(note)


def _rows_taken_together(name: str, tensor: Tensor, result: Any, given: dict[str, Any], rows: int) -> int:
    """Return how many rows an operator combines, e.g. 8 for a variance over 8 rows."""
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


def taken_together(one: Coupled, rank: Coupled) -> list[Together]:
    """Return the operator calls that combine another number of samples on a rank."""
    rows: dict[Any, set[int]] = {}
    for *call, count in rank:
        rows.setdefault(tuple(call), set()).add(count)
    found = list[Together]()
    for (name, module, number, dims, count), place in one.items():
        if place and rows.get((name, module, number, dims), set()) - {count}:
            statistic = f"{place} takes several samples of a batch together ({name})"
            pairs = f"{place} compares the samples of a batch with each other"
            found.append(Together(name, module, statistic if dims[0][0] == STATISTIC else pairs))
    return found
