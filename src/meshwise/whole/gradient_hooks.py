"""Call the program's own hooks of parameters behind the reduction.

While a backward runs, the gradient of a parameter is this rank's part. The program's hooks get what one device has.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

KINDS = ("_backward_hooks", "_post_accumulate_grad_hooks")


@contextlib.contextmanager
def behind_the_reduction(parameters: Iterable[weakref.ref[nn.Parameter]]) -> Iterator[None]:
    """Return a context manager for a backward and its reduction. The program's hooks are called at its end."""
    every = [p for ref in parameters if (p := ref()) is not None and any(getattr(p, kind, None) for kind in KINDS)]
    taken = [(p, *own) for p in every if any(own := (_take(p._backward_hooks), _take(_after(p))))]
    if not taken:
        yield
        return
    before = [p.grad for p, *_ in taken]
    for p, *_ in taken:
        p.grad = None
    try:
        yield
    finally:
        for p, changing, after in taken:
            (p._backward_hooks if p._backward_hooks is not None else {}).update(changing)
            _after(p).update(after)
    for (p, changing, after), earlier in reversed([*zip(taken, before, strict=True)]):
        if (found := p.grad) is None:
            p.grad = earlier
            continue
        with torch.no_grad():
            for hook in changing.values():
                made = hook(found)
                found = found if made is None else made
            p.grad = found if earlier is None else earlier.add_(found)
        for hook in after.values():
            hook(p)


def _after(p: nn.Parameter) -> dict[int, Any]:
    found: dict[int, Any] | None = getattr(p, KINDS[1], None)
    return {} if found is None else found


def _take(held: dict[int, Any] | None) -> dict[int, Any]:
    """Remove the program's hooks from those of a parameter, and return them."""
    own = {key: hook for key, hook in (held or {}).items() if not _is_ours(hook)}
    for key in own:
        held.pop(key)  # type: ignore[union-attr]
    return own


def _is_ours(hook: Any) -> bool:
    function = getattr(hook, "func", hook)  # of a partial
    return (getattr(function, "__module__", None) or type(function).__module__).startswith(("meshwise.", "torch."))
