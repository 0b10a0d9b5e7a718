"""Check whether elements share memory, within or between tensors.

torch's own check often cannot tell.
"""

from __future__ import annotations

import torch
from torch import Tensor


def repeats(tensor: Tensor) -> bool:
    """Check whether elements of the tensor share memory, as in an expanded tensor or overlapping windows."""
    if tensor.is_contiguous() or tensor.numel() < 2:
        return False
    reach = 0  # the furthest element of the smaller strides so far
    certain = True
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1:
            continue
        if stride == 0:
            return True
        if stride <= reach:
            certain = False
        reach += stride * (size - 1)
    return not certain and _places(tensor).unique().numel() < tensor.numel()


def overlapping(tensor: Tensor, other: Tensor) -> bool:
    """Check whether two tensors may share memory without being the same view.

    This is also true for some tensors that share no memory, such as x[::2] and x[1::2]. A copy between them then uses
    an unnecessary temporary tensor.
    """
    if tensor.numel() == 0 or other.numel() == 0 or _apart(tensor, other) or tensor.is_set_to(other):
        return False
    start, end = _range(tensor)
    first, last = _range(other)
    return tensor.device == other.device and start < last and first < end


def torchs_check_is_sure(dst: Tensor, src: Tensor) -> bool:
    """Check whether `dst.copy_(src)` needs no further check for shared memory."""
    if dst.is_contiguous():
        return src.is_contiguous() or _apart(dst, src)
    return not repeats(dst) and _apart(dst, src)


def _apart(tensor: Tensor, other: Tensor) -> bool:
    """Check whether the tensors' storages have no byte in common."""
    ours, its = tensor.untyped_storage(), other.untyped_storage()
    start, first = ours.data_ptr(), its.data_ptr()
    return start + ours.nbytes() <= first or first + its.nbytes() <= start


def _range(tensor: Tensor) -> tuple[int, int]:
    """Return the address of the tensor's first byte and the address after its last byte."""
    reach = sum(stride * (size - 1) for stride, size in zip(tensor.stride(), tensor.shape, strict=True))
    start = tensor.data_ptr()
    return start, start + (reach + 1) * tensor.element_size()


def _places(tensor: Tensor) -> Tensor:
    """Return the offset of every element from the first element, in elements."""
    places = torch.zeros((), dtype=torch.int64)
    for stride, size in zip(tensor.stride(), tensor.shape, strict=True):
        places = places.unsqueeze(-1) + torch.arange(size) * stride
    return places
