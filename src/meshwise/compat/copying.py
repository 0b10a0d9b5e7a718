"""Copies of many tensors in one call, and host memory that an accelerator copies into by itself.

Tested in tests/recovery/test_last_state.py.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def copy_all(into: Sequence[Tensor], sources: Sequence[Tensor], *, non_blocking: bool = False) -> None:
    """Copy each tensor into the one at its place. They have the same shapes."""
    if into:
        torch._foreach_copy_(list(into), list(sources), non_blocking)


def pin(memory: Tensor) -> bool:
    """Pin host memory that is there already; whether that was done. Without it copies wait for themselves."""
    return int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)) == 0


def unpin(memory: Tensor) -> None:
    """Before pinned memory is let go."""
    torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())
