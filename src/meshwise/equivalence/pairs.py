"""Operators that make something of every pair of a batch's samples: a loss that compares samples with each other.

A tensor with two dims that both grow with the rank's rows holds pairs. Of one forward alone that may be chance (as many
features as samples); of the same call in two with other numbers of samples it is not.
"""

from __future__ import annotations

from collections import Counter
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor

from meshwise.compat.dispatch import intercept_operators, operator_name
from meshwise.spec.user_code import user_place

Dims = tuple[tuple[int, float], ...]
"""Dims of a tensor that are multiples of the rows, and how often each has them."""
Pairs = dict[tuple[str, int, Dims], str]
"""(operator, number of its call, dims of what it gives) -> where it stands in the program."""


def noting_pairs(rows: int, found: Pairs) -> AbstractContextManager[Any]:
    """In the with-body what operators give goes into `found`, where two of its dims are multiples of `rows`."""
    calls: Counter[str] = Counter()

    def note(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = operator(*args, **kwargs)
        if rows > 1 and isinstance(result, Tensor) and result.dim() > 1:
            name = operator_name(operator)
            calls[name] += 1
            dims = tuple((d, size / rows) for d, size in enumerate(result.shape) if size and size % rows == 0)
            if len(dims) > 1:
                found.setdefault((name, calls[name], dims), user_place())
        return result

    return intercept_operators(note)


def pairs_of_both(one: Pairs, rank: Pairs) -> list[str]:
    """Where both sides make pairs, in the order of one device."""
    return [place for key, place in one.items() if key in rank]
