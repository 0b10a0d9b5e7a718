"""Find the exchange that was under way when NaN appeared.

The buffer that an exchange writes holds NaN until it has ended.

Tested in tests/equivalence/test_kinds.py.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor

from meshwise.compat.dispatch import gives_view, intercept_operators, operator_name
from meshwise.compat.perturbed import open_exchanges
from meshwise.compat.tree import tensors_in
from meshwise.spec.user_code import user_place
from meshwise.spec.words import some

UNREAD = ("fill_", "empty", "new_empty", "empty_like", "empty_strided", "copy_")
"""Operators whose NaN nobody has computed with yet."""


def noting_nan(found: list[str], perturbed: bool) -> AbstractContextManager[Any]:
    """Add to `found` a sentence on the first operator in the body that returns NaN while an exchange is open."""

    def note(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result, name = operator(*args, **kwargs), operator_name(operator)
        under_way = [] if found or name in UNREAD or gives_view(operator) else open_exchanges()
        if under_way and any(is_nan(tensor) for tensor in tensors_in(result)):
            say_nan(found, f"{name} at {user_place() or 'meshwise'} computed with", under_way)
        return result

    return intercept_operators(note) if perturbed else nullcontext()


def say_nan(found: list[str], what: str, under_way: list[str]) -> None:
    """Add a sentence on an open exchange at the moment when a value is NaN."""
    found.append(f"nobody had waited for {some(under_way)} when {what} what it writes")


def is_nan(tensor: Tensor) -> bool:
    """Return whether it contains NaN."""
    return tensor.is_floating_point() and bool(tensor.detach().isnan().any())
