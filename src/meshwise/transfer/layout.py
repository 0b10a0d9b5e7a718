"""Layout: a tensor that is divided over the ranks of a mesh, and the same tensor whole."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor


def whole(tensor: Tensor) -> Tensor:
    """The whole tensor: the parts of a DTensor are gathered from all ranks. Collective where it is one."""
    if not isinstance(tensor, DTensor):
        return tensor
    kind = tensor.device_mesh.device_type  # parts that wait in the host's memory are gathered on the devices
    there: Any = tensor if tensor.device.type == kind else tensor.to(kind)
    gathered: Tensor = there.full_tensor()
    return gathered


def part_of(like: Tensor) -> tuple[slice, ...]:
    """Which part of the whole tensor this rank holds, a slice a dim: all of it where `like` is not divided."""
    bounds = [(0, length) for length in like.shape]
    if isinstance(like, DTensor):
        for axis, placement in enumerate(like.placements):
            if isinstance(placement, Shard):
                begin, end = bounds[placement.dim]
                size, own = like.device_mesh.size(axis), like.device_mesh.get_local_rank(axis)
                step = -(-(end - begin) // size)  # as torch.chunk divides
                first = min(end, begin + own * step)
                bounds[placement.dim] = first, min(end, first + step)
    return tuple(slice(begin, end) for begin, end in bounds)


def lay_as(value: Tensor, parameter: Tensor) -> Tensor:
    """`value`, whole on every rank, divided over the ranks as `parameter` is; of another shape, whole on every one.

    Nothing is sent: each rank keeps its part.
    """
    if not isinstance(parameter, DTensor) or isinstance(value, DTensor):
        return value
    mesh = parameter.device_mesh
    placements = parameter.placements if value.shape == parameter.shape else [Replicate()] * mesh.ndim
    laid = distribute_tensor(value.detach(), mesh, placements, src_data_rank=None)
    return laid if laid.device == parameter.device else laid.to(parameter.device)
