"""A tensor that is sharded over the ranks of a mesh (a DTensor), and the same tensor whole."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor


def full_tensor(tensor: Tensor) -> Tensor:
    """The whole tensor: the shards of a DTensor are gathered from all ranks. Collective for a DTensor."""
    if not isinstance(tensor, DTensor):
        return tensor
    kind = tensor.device_mesh.device_type  # shards that are offloaded to the host are gathered on the devices
    there: Any = tensor if tensor.device.type == kind else tensor.to(kind)
    gathered: Tensor = there.full_tensor()
    return gathered


def local_slices(like: Tensor) -> tuple[slice, ...]:
    """Which part of the whole tensor is this rank's shard, a slice a dim: all of it where `like` is not sharded."""
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


def shard_like(value: Tensor, parameter: Tensor) -> Tensor:
    """`value`, whole on every rank, sharded as `parameter` is; replicated where it has another shape.

    Nothing is sent: each rank keeps its shard.
    """
    if not isinstance(parameter, DTensor) or isinstance(value, DTensor):
        return value
    mesh = parameter.device_mesh
    placements = parameter.placements if value.shape == parameter.shape else [Replicate()] * mesh.ndim
    sharded = distribute_tensor(value.detach(), mesh, placements, src_data_rank=None)
    return sharded if sharded.device == parameter.device else sharded.to(parameter.device)
