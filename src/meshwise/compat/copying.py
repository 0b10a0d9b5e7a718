"""Copy many tensors in one call.

Tested in tests/recovery/test_last_state.py.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def copy_all(into: Sequence[Tensor], sources: Sequence[Tensor], *, non_blocking: bool = False) -> None:
    """Copy each tensor of `sources` into the tensor at the same index of `into`, which must have the same shape."""
    if into:
        torch._foreach_copy_(list(into), list(sources), non_blocking)
