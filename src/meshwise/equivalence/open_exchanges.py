"""Find the exchange that was under way when NaN appeared.

The buffer that an exchange writes holds NaN until the exchange has ended.

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
"""Operators whose result may hold NaN although nothing has computed with the NaN yet."""


def noting_nan(found: list[str], perturbed: bool) -> AbstractContextManager[Any]:
    """Append to `found` a sentence on the first operator in the with-body that returns NaN during an exchange."""

    def note(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result, name = operator(*args, **kwargs), operator_name(operator)
        under_way = [] if found or name in UNREAD or gives_view(operator) else open_exchanges()
        if under_way and any(is_nan(tensor) for tensor in tensors_in(result)):
            say_nan(found, f"{name} at {user_place() or 'meshwise'} computed with", under_way)
        return result

    return intercept_operators(note) if perturbed else nullcontext()


def say_nan(found: list[str], what: str, under_way: list[str]) -> None:
    """Append to `found` a sentence on the exchanges that were under way when a value was NaN."""
    found.append(f"nobody had waited for {some(under_way)} when {what} what it writes")


def is_nan(tensor: Tensor) -> bool:
    """Return whether a tensor contains NaN."""
    return tensor.is_floating_point() and bool(tensor.detach().isnan().any())
