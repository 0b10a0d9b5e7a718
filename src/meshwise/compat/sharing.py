"""Whether a tensor's memory is another tensor's too: what a view shares, and what may be written.

torch counts the owners of a storage, but tells only privately. Read in torch 2.11, 2.13 and 2.15: `csrc/Module.cpp`,
`_inductor/cudagraph_trees.py`. Where it does not tell, all memory is taken for shared: a copy too many, never one too
few.
"""

from __future__ import annotations

import torch
from torch import Tensor

_count = getattr(torch._C, "_storage_Use_Count", None)


def is_shared(tensor: Tensor) -> bool:
    """Whether another tensor that lives, a NumPy array or a DLPack capsule may hold this tensor's memory."""
    if _count is None:  # pragma: no cover - no such torch is in range
        return True
    storage = tensor.untyped_storage()
    # Two owners are known: the tensor, and Python's name for its storage. A capsule holds the tensor instead.
    return bool(_count(storage._cdata) > 2 or tensor._use_count() > 1)  # type: ignore[attr-defined]
