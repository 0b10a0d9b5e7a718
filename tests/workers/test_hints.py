"""Errors of Python and torch, where a script meets meshwise, get a note of what to write instead."""

from __future__ import annotations

import errno
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import meshwise as mw
from meshwise.workers.failure import by_error
from meshwise.workers.hints import add_hint, hint


def given() -> tuple[nn.Module, torch.optim.Optimizer, torch.utils.data.DataLoader[Any]]:
    model = nn.Sequential(nn.Linear(2, 1))
    data = torch.utils.data.TensorDataset(torch.ones(4, 2))
    return model, torch.optim.SGD(model.parameters(), 0.1), torch.utils.data.DataLoader(data, batch_size=2)


def a_module_of_the_model() -> None:
    given()[0].module.state_dict()  # type: ignore[union-attr]


def ddp() -> None:
    DistributedDataParallel(nn.Linear(1, 1))


def barrier() -> None:
    dist.barrier()


def another_attribute() -> None:
    given()[0].modul  # type: ignore[union-attr]  # noqa: B018


def a_number_called() -> None:
    objects: Any = mw.distribute(*given(), view="rank")
    len(objects)()  # type: ignore[operator]


def a_loss_without_a_model() -> None:
    torch.zeros(()).backward()


def cuda_in_a_loaders_worker() -> None:
    forked = "Cannot re-initialize CUDA in forked subprocess. To use CUDA with multiprocessing, you must use spawn"
    raise RuntimeError(f"Caught RuntimeError in DataLoader worker process 0.\nRuntimeError: {forked}")


def cuda_without_a_gpu() -> None:
    torch.zeros(1).cuda()


def another_workers_device() -> None:
    raise RuntimeError("CUDA error: invalid device ordinal")


def mps_elsewhere() -> None:
    raise RuntimeError("PyTorch is not linked with support for mps devices")


def no_room() -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def too_many_files() -> None:
    raise OSError(errno.EMFILE, "Too many open files", "/proc")


NO_DEVICE = "This machine has no such device. Remove .cuda() and .to('cuda'): mw.distribute puts the model"
HINTS = {
    no_room: "A disk is full: see df -h",
    too_many_files: "Raise the limit with ulimit -n 4096.",
    **({} if torch.cuda.is_available() else {cuda_without_a_gpu: NO_DEVICE}),
    another_workers_device: "A worker sees only its own device. Remove the device index",
    mps_elsewhere: NO_DEVICE,
    a_module_of_the_model: "meshwise does not wrap the model: use model instead of model.module.",
    ddp: "instead of DDP",
    a_loss_without_a_model: "output[mask].sum() / max(n, 1)",
    barrier: "mw.distribute makes the process group",
    cuda_in_a_loaders_worker: "return CPU tensors, or set its multiprocessing_context='spawn'.",
    another_attribute: "",
    a_number_called: "",
}


@pytest.mark.parametrize("function", HINTS, ids=lambda f: f.__name__)
def test_an_error_says_what_to_write_instead(function: Callable[[], None]) -> None:
    with pytest.raises((TypeError, AttributeError, ValueError, RuntimeError, AssertionError, OSError)) as caught:
        function()
    found = hint(caught.value)
    assert HINTS[function] in found and bool(found) is bool(HINTS[function])
    add_hint(caught.value)
    assert by_error(0, caught.value).notes == ([found] if found else [])
