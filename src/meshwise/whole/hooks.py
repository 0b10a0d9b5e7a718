"""Call the program's hooks of parameters behind the reduction of their gradients.

During a backward a gradient is this rank's part.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from meshwise.compat.modules import gradient_hooks


@contextlib.contextmanager
def hooks_behind_the_reduction(parameters: Iterable[weakref.ref[nn.Parameter]]) -> Iterator[None]:
    """Return a context manager for a backward and its reduction. The program's hooks are called at its end."""
    taken: list[tuple[nn.Parameter, Tensor | None, list[dict[int, Any]]]] = []
    for ref in parameters:
        if (p := ref()) is not None and any(own := [_take(held) for held in gradient_hooks(p)]):
            taken.append((p, p.grad, own))
            p.grad = None
    try:
        yield
    finally:
        for p, _, own in taken:
            for held, hooks in zip(gradient_hooks(p), own, strict=True):
                held.update(hooks)
    for p, earlier, (changing, after) in reversed(taken):
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


def _take(held: dict[int, Any]) -> dict[int, Any]:
    """Remove the program's hooks from those of a parameter, and return them."""
    return {key: held.pop(key) for key in [key for key, hook in held.items() if is_of_program(hook)]}


def is_of_program(hook: Any) -> bool:
    """Return whether a hook is the program's own, and neither torch's nor meshwise's."""
    function = getattr(hook, "func", hook)  # of a partial
    module = getattr(function, "__module__", None) or type(function).__module__
    return not module.startswith(("meshwise.", "torch."))
