"""What torch has asked the driver of accelerators, which reads the environment once and does not survive a fork.

`torch.cuda.device_count()` reads CUDA_VISIBLE_DEVICES anew, through NVML, even after the driver has: the count that the
driver keeps is private, and so is whether a forked process may ask it. Read in torch 2.11, 2.13 and 2.15:
`cuda/__init__.py`, `csrc/cuda/Module.cpp`.
"""

import torch


def shown_gpus() -> int:
    """How many CUDA devices the driver shows this process, whatever the environment has named since it was asked."""
    asked = getattr(torch._C, "_cuda_getDeviceCount", torch.cuda.device_count)  # a CPU build has no such count
    return int(asked())


def lost_by_fork(kind: str) -> bool:
    """Whether this process cannot use accelerators of `kind`, since the one that forked it had asked for some."""
    check = getattr(getattr(torch, kind, None), "_is_in_bad_fork", None)
    return check is not None and bool(check())
