"""Find the exchange that was under way when NaN appeared.

An exchange is a collective or a point-to-point transfer. In a perturbed check, the buffer that it writes holds NaN
until it has ended.

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
"""Operators that compute nothing, but copy, fill or allocate memory. NaN in their result is ignored."""


def noting_nan(found: list[str], perturbed: bool) -> AbstractContextManager[Any]:
    """Look inside the with block for operators that read a buffer before a collective or a transfer has written it. The
    check fills the buffer with NaN until the collective or transfer has ended. So an operator that returns NaN before
    this end has read too early. A sentence about the first such operator is appended to `found`.

    perturbed: whether the check fills buffers with NaN. If False, nothing is watched.
    """

    def note(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result, name = operator(*args, **kwargs), operator_name(operator)
        under_way = [] if found or name in UNREAD or gives_view(operator) else open_exchanges()
        if under_way and any(is_nan(tensor) for tensor in tensors_in(result)):
            say_nan(found, f"{name} at {user_place() or 'meshwise'} computed with", under_way)
        return result

    return intercept_operators(note) if perturbed else nullcontext()


def say_nan(found: list[str], what: str, under_way: list[str]) -> None:
    """Append to `found` a sentence that names the exchanges in flight when a value was NaN.

    what: the beginning of the sentence, which names the operation that used the value.
    under_way: the names of the exchanges.
    """
    found.append(f"nobody had waited for {some(under_way)} when {what} what it writes")


def is_nan(tensor: Tensor) -> bool:
    """Return whether a tensor contains NaN."""
    return tensor.is_floating_point() and bool(tensor.detach().isnan().any())
