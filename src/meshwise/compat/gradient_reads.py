"""Settle waiting gradients when `.grad` of a parameter is read.

While gradients wait on their rank, reading or setting one calls `settle` first.

torch's attribute is in C. A property of the same name stands before it on the classes of parameters, from `watch` until
`end`: no longer than gradients wait, so that no other step pays for it. Our own code reads what is there.

Read in torch 2.13: `_C/TensorBase.grad`; autograd, which works in C, never asks the property.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from meshwise.spec.user_code import OURS

_GRAD: Any = Tensor.grad
_CLASSES: tuple[Any, ...] = (nn.Parameter, DTensor)
WATCHING: list[Callable[[Tensor], None]] = []


def watch(settle: Callable[[Tensor], None]) -> None:
    """Until `end()` is called, call `settle(p)` before the program reads, sets or deletes the gradient of a parameter
    `p`."""
    WATCHING[:] = [settle]
    for kind in _CLASSES:
        kind.grad = _WATCHED


def end() -> None:
    """Undo `watch`: accesses to gradients are no longer intercepted."""
    if WATCHING:
        WATCHING.clear()
        for kind in _CLASSES:
            del kind.grad


def _asked(p: Tensor) -> None:
    if WATCHING and not sys._getframe(2).f_code.co_filename.startswith(OURS):
        WATCHING[0](p)


def _get(p: Tensor) -> Any:
    _asked(p)
    return _GRAD.__get__(p)


def _set(p: Tensor, gradient: Any) -> None:
    _asked(p)
    _GRAD.__set__(p, gradient)


def _delete(p: Tensor) -> None:
    _asked(p)
    _GRAD.__delete__(p)


_WATCHED = property(_get, _set, _delete)
