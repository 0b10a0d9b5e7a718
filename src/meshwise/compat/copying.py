"""Copy many tensors in one call.

Tested in tests/recovery/test_last_state.py.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def copy_all(into: Sequence[Tensor], sources: Sequence[Tensor], *, non_blocking: bool = False) -> None:
    """Copy each tensor to the one at the same index. They have the same shapes."""
    if into:
        torch._foreach_copy_(list(into), list(sources), non_blocking)
