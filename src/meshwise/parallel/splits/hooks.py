"""Call the program's hooks of parameters after their gradients are reduced.

During a backward, a gradient has only this rank's part.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from meshwise.torch_compat.modules import gradient_hooks


class ParameterHooks:
    """Delays the program's hooks of parameters until their gradients are reduced."""

    def __init__(self, parameters: list[weakref.ref[nn.Parameter]]) -> None:
        self._parameters, self._looked, self._hooked = parameters, (0, 0), list[weakref.ref[nn.Parameter]]()
        _count()

    def behind_the_reduction(self) -> AbstractContextManager[None]:
        """Return a context manager for a backward and its reduction. The program's hooks are called at its end."""
        if self._looked != (now := (registered[0], len(self._parameters))):
            every = [(ref, p) for ref in self._parameters if (p := ref()) is not None]
            self._hooked = [ref for ref, p in every if any(map(_of_program, gradient_hooks(p)))]
            self._looked = now
        hooked = [p for ref in self._hooked if (p := ref()) is not None]
        return _behind(hooked) if hooked else contextlib.nullcontext()


registered = [1]
"""A counter that rises whenever a tensor gets a hook."""


@functools.cache
def _count() -> None:
    for name in ("register_hook", "register_post_accumulate_grad_hook"):
        setattr(Tensor, name, _counted(getattr(Tensor, name)))


def _counted(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def register(*args: Any, **kwargs: Any) -> Any:
        registered[0] += 1
        return original(*args, **kwargs)

    return register


@contextlib.contextmanager
def _behind(hooked: list[nn.Parameter]) -> Iterator[None]:
    taken: list[tuple[nn.Parameter, Tensor | None, list[dict[int, Any]]]] = []
    for p in hooked:
        taken.append((p, p.grad, [_take(held) for held in gradient_hooks(p)]))
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


def _of_program(held: dict[int, Any]) -> list[int]:
    return [key for key, hook in held.items() if is_of_program(hook)]


def _take(held: dict[int, Any]) -> dict[int, Any]:
    """Remove the program's hooks from the hooks of a parameter, and return the removed hooks."""
    return {key: held.pop(key) for key in _of_program(held)}


def is_of_program(hook: Any) -> bool:
    """Return whether a hook is the program's own, and neither torch's nor meshwise's."""
    function = getattr(hook, "func", hook)  # unwrap a partial
    module = getattr(function, "__module__", None) or type(function).__module__
    return not module.startswith(("meshwise.", "torch."))
