"""Call CUDA and libc functions that torch does not expose.


`torch.cuda.device_count()` reads CUDA_VISIBLE_DEVICES again, through NVML, even after the driver has read it. The
functions that return the driver's own count, and whether a forked process may use the driver, are private. PyTorch's
own tests use `torch.cuda._sleep`. Based on torch 2.11, 2.13 and 2.15: `cuda/__init__.py`, `csrc/cuda/Module.cpp`.
"""

from __future__ import annotations

import contextlib
import ctypes

import torch

CYCLES_A_SECOND = 2_000_000_000  # clock of the fastest devices; on slower ones, `hold_stream` lasts a little longer


def shown_gpus() -> int:
    """Return the number of CUDA devices that this process can use. A change of CUDA_VISIBLE_DEVICES does not affect it
    once CUDA is initialized."""
    asked = getattr(torch._C, "_cuda_getDeviceCount", torch.cuda.device_count)  # CPU builds lack the first function
    return int(asked())


def lost_by_fork(kind: str) -> bool:
    """Return whether this process cannot use accelerators of `kind` because its parent used them before the fork."""
    check = getattr(getattr(torch, kind, None), "_is_in_bad_fork", None)
    return check is not None and bool(check())


def computes_bf16(device: torch.device | str) -> bool:
    """Return whether the device computes in bf16 natively. On older GPUs torch only emulates bf16."""
    ask = getattr(torch.get_device_module(device), "is_bf16_supported", None)
    return ask is None or bool(ask(including_emulation=False))


def is_capturing() -> bool:
    """Return whether the current CUDA stream is capturing a graph, so that work is recorded instead of run."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def hold_stream(seconds: float) -> None:
    """Keep the current CUDA stream busy for about `seconds`, so that the host can enqueue work before the stream runs
    it. Do nothing if this process has not used CUDA."""
    if torch.cuda.is_initialized():
        torch.cuda._sleep(int(seconds * CYCLES_A_SECOND))


def trim_heap() -> None:
    """Return freed memory to the operating system, if the C library is glibc. Takes some milliseconds."""
    with contextlib.suppress(AttributeError, TypeError):  # other C libraries lack this function
        ctypes.CDLL(None).malloc_trim(0)
