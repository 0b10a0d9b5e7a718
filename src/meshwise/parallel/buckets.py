"""Group neighbouring tensors of one dtype and device, to move together.

Tested in tests/parallel/test_offload_state.py and test_zero1.py.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch.distributed.tensor import DTensor


def local(tensor: Tensor) -> Tensor:
    """Return the local part of a DTensor. Any other tensor is returned unchanged."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def buckets_of(tensors: Sequence[Tensor], most: int) -> list[list[Tensor]]:
    """Group adjacent tensors of the same dtype and device into buckets. A bucket has at most `most` bytes on this rank,
    except that a tensor larger than `most` has a bucket of its own."""
    buckets: list[list[Tensor]] = []
    size = 0
    for t in tensors:
        size += local(t).nbytes
        last = buckets[-1] if buckets else []
        if not last or size > most or (last[0].dtype, last[0].device) != (t.dtype, t.device):
            buckets.append([])
            size = local(t).nbytes
        buckets[-1].append(t)
    return buckets
