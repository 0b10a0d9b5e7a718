"""Mark ranges for torch.profiler (Kineto) and Nsight Systems (NVTX).

A `record_function` costs 6 µs even when nobody profiles, so it is made only while torch's profiler runs. The flag that
says so is private; where it is missing, no range is made. Read in torch 2.11, 2.13 and 2.15: `autograd/profiler.py`.
"""

from __future__ import annotations

import functools
import os
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.autograd import profiler

PREFIX = "meshwise."
# Nsight Systems sets the first in what it starts; the second is for a process that it attaches to.
# Asked of torch's build, not of its devices: `is_available` while this is imported would spoil every fork that follows.
HAS_NVTX = bool(torch.version.cuda or torch.version.hip)
NVTX = HAS_NVTX and bool({"NSYS_PROFILING_SESSION_ID", "MESHWISE_NVTX"} & os.environ.keys())

is_profiled = functools.partial(getattr, profiler, "_is_profiler_enabled", False)
"""Return whether torch's profiler is running. This is called for every span, so it must cost next to nothing."""


def open_range(name: str) -> AbstractContextManager[Any] | None:
    """Begin the profiler range `meshwise.NAME`, and return it, for the caller to exit. Return None if no profiler is
    running."""
    if is_profiled():
        opened: AbstractContextManager[Any] = profiler.record_function(PREFIX + name)
    elif NVTX:
        opened = torch.cuda.nvtx.range(PREFIX + name)
    else:
        return None
    opened.__enter__()
    return opened
