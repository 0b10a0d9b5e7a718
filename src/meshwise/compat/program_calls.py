"""Wrap a program's calls into torch: next batch, backward, `eval()`, process group.

Each of them passes through one function, which is wrapped. `end` restores it, unless it was replaced again since.
Read in torch 2.11, 2.13 and 2.15: `utils/data/dataloader.py`, `autograd/__init__.py`, `distributed/device_mesh.py`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import device_mesh
from torch.utils.data.dataloader import _BaseDataLoaderIter

Around = Callable[[], AbstractContextManager[None]]
End = Callable[[], None]


def around_batches(around: Around) -> End:
    """Run each fetch of a DataLoader's next batch inside the context manager that `around()` returns. This includes the
    last fetch, which raises StopIteration. Return a function that undoes this."""
    return _replace([_BaseDataLoaderIter], "__next__", around)


def around_backwards(around: Around) -> End:
    """Run each `loss.backward()` inside the context manager that `around()` returns. Return a function that undoes
    this."""
    return _replace([torch.autograd], "backward", around)


def around_process_groups(around: Around) -> End:
    """Run `init_process_group` inside the context manager that `around()` returns. Return a function that undoes
    this."""
    return _replace([dist, dist.distributed_c10d, device_mesh], "init_process_group", around)


def around_evals(around: Around) -> End:
    """Run each `module.eval()` inside the context manager that `around()` returns. Return a function that undoes
    this."""
    return _replace([nn.Module], "eval", around)


def around_trains(around: Around) -> End:
    """Replace `nn.Module.train`, so that each call runs inside the context manager that `around()` returns. Return a
    function that undoes the replacement.

    `train` calls itself for each submodule, so the context is entered again for each submodule."""
    return _replace([nn.Module], "train", around)


def _replace(owners: list[Any], name: str, around: Around) -> End:
    def surrounding(plain: Any) -> Any:
        @functools.wraps(plain)
        def surrounded(*arguments: Any, **named: Any) -> Any:
            with around():
                return plain(*arguments, **named)

        return surrounded

    return put(owners, name, surrounding)


def put(owners: list[Any], name: str, made_of: Callable[[Any], Any]) -> End:
    """Replace the function `name` of each module or class in `owners` by the wrapper `made_of(function)`. The function
    is read from the first owner. Return a function that puts the original back into all owners."""
    plain: Any = getattr(owners[0], name)
    put = made_of(plain)
    for owner in owners:
        setattr(owner, name, put)

    def end() -> None:
        for owner in owners:
            if getattr(owner, name) is put:
                setattr(owner, name, plain)

    return end


def hooks_of(tensor: torch.Tensor) -> list[Any]:
    """Return the hooks that receive the tensor's gradient before the gradient is added to `.grad`."""
    return list((tensor._backward_hooks or {}).values())
