"""Wrap a program's calls into torch: batch, backward, process group, `.grad`.

Each of these calls passes through one function of torch, which is wrapped. The function that undoes this leaves the
wrapper in place if another wrapper was put around it. `.grad` is an attribute in C. A property of the same name hides
it on the classes of parameters, but only while a rank has unreduced gradients, so that other steps cost no more.
Autograd and meshwise's own code bypass the property. Based on torch 2.11, 2.13 and 2.15: `utils/data/dataloader.py`,
`autograd/__init__.py`, `distributed/device_mesh.py`, `_C/TensorBase.grad`.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import device_mesh
from torch.distributed.tensor import DTensor
from torch.utils.data.dataloader import _BaseDataLoaderIter

from meshwise.spec.user_code import OURS

End = Callable[[], None]
TORCH = str(Path(torch.__file__).parent) + os.sep
"""The folder of torch, with which the paths of its files begin."""

PLACES: dict[str, list[Any]] = {
    "__next__": [_BaseDataLoaderIter],
    "backward": [torch.autograd],
    "init_process_group": [dist, dist.distributed_c10d, device_mesh],
}
"""For each function that `around` can wrap, where torch keeps it. The last `__next__` of a DataLoader's iterator raises
StopIteration."""


def around(name: str, context: Callable[[], AbstractContextManager[None]]) -> End:
    """Run each call of the function `name`, a key of PLACES, inside the context manager that `context()` returns.
    Return a function that undoes this."""

    def surrounding(plain: Any) -> Any:
        @functools.wraps(plain)
        def surrounded(*arguments: Any, **named: Any) -> Any:
            with context():
                return plain(*arguments, **named)

        return surrounded

    return put(PLACES[name], name, surrounding)


def put(owners: list[Any], name: str, made_of: Callable[[Any], Any]) -> End:
    """Replace the function `name` of each module or class in `owners` with the wrapper `made_of(function)`. The
    function is read from the first owner. Return a function that puts the original back into all owners."""
    plain: Any = getattr(owners[0], name)
    put = made_of(plain)
    for owner in owners:
        setattr(owner, name, put)

    def end() -> None:
        for owner in owners:
            if getattr(owner, name) is put:
                setattr(owner, name, plain)

    return end


_GRAD: Any = Tensor.grad
_CLASSES: tuple[Any, ...] = (nn.Parameter, DTensor)
WATCHING: list[Callable[[Tensor], None]] = []


def watch_gradients(settle: Callable[[Tensor], None]) -> None:
    """Until `leave_gradients`, call `settle(p)` before the program reads, sets or deletes a parameter's gradient."""
    WATCHING[:] = [settle]
    for kind in _CLASSES:
        kind.grad = _WATCHED


def leave_gradients() -> None:
    """Undo `watch_gradients`: accesses to gradients are no longer intercepted."""
    if WATCHING:
        WATCHING.clear()
        for kind in _CLASSES:
            del kind.grad


def _asked(access: Callable[..., Any]) -> Callable[..., Any]:
    def asked(p: Tensor, *gradient: Any) -> Any:
        if WATCHING and not sys._getframe(1).f_code.co_filename.startswith(OURS):
            WATCHING[0](p)
        return access(p, *gradient)

    return asked


_WATCHED = property(_asked(_GRAD.__get__), _asked(_GRAD.__set__), _asked(_GRAD.__delete__))
