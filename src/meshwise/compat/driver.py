"""Ask CUDA what torch's public names do not tell.

That is: forks, the driver's count, pinning, a held stream.

`torch.cuda.device_count()` reads CUDA_VISIBLE_DEVICES anew, through NVML, even after the driver has: the count that the
driver keeps is private, and so is whether a forked process may ask it. `torch.cuda._sleep` is what PyTorch's own tests
use. Read in torch 2.11, 2.13 and 2.15: `cuda/__init__.py`, `csrc/cuda/Module.cpp`.
"""

import contextlib

import torch
from torch import Tensor

CYCLES_A_SECOND = 2_000_000_000  # of the fastest devices; on a slower one the stream is held a little longer


def shown_gpus() -> int:
    """How many CUDA devices the driver shows this process, whatever the environment has named since it was asked."""
    asked = getattr(torch._C, "_cuda_getDeviceCount", torch.cuda.device_count)  # a CPU build has no such count
    return int(asked())


def lost_by_fork(kind: str) -> bool:
    """Whether this process cannot use accelerators of `kind`, since the one that forked it had asked for some."""
    check = getattr(getattr(torch, kind, None), "_is_in_bad_fork", None)
    return check is not None and bool(check())


def computes_bf16(device: torch.device | str) -> bool:
    """Whether the device has bf16 of its own: torch emulates it on GPUs that are older than it."""
    ask = getattr(torch.get_device_module(device), "is_bf16_supported", None)
    return ask is None or bool(ask(including_emulation=False))


def is_capturing() -> bool:
    """Whether what this thread does is captured into a CUDA graph, and not done."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def hold_stream(seconds: float) -> bool:
    """Keep the current CUDA stream busy for about `seconds`, so that what is enqueued behind it does not wait for the
    host; False where nothing in this process has used CUDA."""
    if not torch.cuda.is_initialized():
        return False
    torch.cuda._sleep(int(seconds * CYCLES_A_SECOND))
    return True


def pin(memory: Tensor) -> bool:
    """Pin host memory that is there already; whether that was done: files on a disk cannot be. Without it copies wait
    for themselves."""
    if int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)) == 0:
        return True
    with contextlib.suppress(RuntimeError):  # CUDA keeps the error for the next kernel, which would be the user's
        torch.empty(1, device="cuda").neg_()
    return False


def unpin(memory: Tensor) -> None:
    """Before pinned memory is let go."""
    torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())
