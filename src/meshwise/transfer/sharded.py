"""Convert between a sharded tensor and the whole one.

The sharded tensor is a DTensor over the ranks of a mesh.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, distribute_tensor
from torch.nn import functional

from meshwise.torch_compat import sharding
from meshwise.torch_compat.whole_values import whole
from meshwise.transfer import collectives
from meshwise.transfer.reading import together
from meshwise.transfer.traced import ours

BUCKET = 25 << 20  # bytes of whole tensors that are gathered in one collective
Box = tuple[tuple[int, int], ...]
"""A part of a tensor, as (begin, end) for each dim."""


def full_tensor(tensor: Tensor) -> Tensor:
    """Return the whole tensor. The shards of a DTensor are gathered from all ranks, which must all call this."""
    if not isinstance(tensor, DTensor):
        return tensor
    with together(), ours():
        return whole(tensor)


def full_tensors(tensors: Sequence[Tensor]) -> Iterator[Tensor]:
    """Yield `full_tensor` of each tensor, in order. If there are DTensors, all ranks must call this.

    Shards are gathered in buckets, since one collective per tensor would take minutes for thousands of small tensors.
    """
    waiting: list[DTensor] = []
    held = 0
    for tensor in tensors:
        bucketed = isinstance(tensor, DTensor) and _sharded_axis(tensor) is not None
        size = tensor.numel() * tensor.element_size()
        if waiting and not (bucketed and held + size <= BUCKET and _alike(waiting[0], tensor)):
            yield from _gathered(waiting)
            waiting, held = [], 0
        if bucketed:
            waiting.append(tensor)  # type: ignore[arg-type]
            held += size
        else:
            yield full_tensor(tensor)
    yield from _gathered(waiting)


def _alike(first: Any, tensor: Any) -> bool:
    return bool(first.device_mesh == tensor.device_mesh and first.dtype == tensor.dtype)


def _sharded_axis(tensor: DTensor) -> int | None:
    """Return the mesh axis that shards the tensor, if exactly one axis does and it shards dim 0.
    Otherwise None."""
    axes = [axis for axis, placement in enumerate(tensor.placements) if not placement.is_replicate()]
    return axes[0] if len(axes) == 1 and sharding.division(tensor.placements[axes[0]]) == (0, 1) else None


def _gathered(tensors: Sequence[DTensor]) -> Iterator[Tensor]:
    """Yield the whole tensors of DTensors that are all sharded over the same axis of one mesh."""
    if not tensors:
        return
    mesh, axis = tensors[0].device_mesh, _sharded_axis(tensors[0])
    assert axis is not None
    rows = [-(-len(tensor) // mesh.size(axis)) for tensor in tensors]  # rounded up, as in torch.chunk
    parts = []
    for tensor, most in zip(tensors, rows, strict=True):
        local = tensor.to_local().detach().to(mesh.device_type)
        parts.append(functional.pad(local.reshape(-1), (0, most * (tensor.numel() // len(tensor)) - local.numel())))
    ranks = collectives.all_gather(torch.cat(parts), mesh.get_group(axis))
    for tensor, gathered in zip(tensors, ranks.split([len(part) for part in parts], dim=1), strict=True):
        yield gathered.reshape(-1)[: tensor.numel()].view(tensor.shape)


def local_part(like: Tensor, read: Callable[[tuple[slice, ...]], Tensor]) -> Tensor:
    """Read this rank's part of a tensor that is sharded like the tensor `like`, and return this part. If `like` is not
    sharded, read the whole tensor.

    read: returns a region of the whole tensor, given one slice per dim.
    """
    boxes, several = local_boxes(like)
    pieces = [read(tuple(slice(*each) for each in box)) for box in boxes]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, several)


def local_boxes(like: Tensor) -> tuple[list[Box], int]:
    """Return the boxes of the whole tensor that make up this rank's shard, and the dim along which to concatenate them.

    A tensor that is not sharded is one box.
    """
    bounds = [[(0, length)] for length in like.shape]
    if isinstance(like, DTensor):
        for axis, dim, sections in sharding.in_order_of_division(like.device_mesh, like.placements):
            size, own = like.device_mesh.size(axis), like.device_mesh.get_local_rank(axis)
            bounds[dim] = [_nth(piece, own, size) for whole in bounds[dim] for piece in _cut(whole, sections)]
    return list(itertools.product(*bounds)), next((dim for dim, each in enumerate(bounds) if len(each) > 1), 0)


def _cut(whole: tuple[int, int], sections: int) -> list[tuple[int, int]]:
    begin, length = whole[0], (whole[1] - whole[0]) // sections
    return [(begin + n * length, begin + (n + 1) * length) for n in range(sections)] if sections > 1 else [whole]


def _nth(piece: tuple[int, int], own: int, size: int) -> tuple[int, int]:
    begin, end = piece
    step = -(-(end - begin) // size)  # rounded up, as in torch.chunk
    first = min(end, begin + own * step)
    return first, min(end, first + step)


def placed(p: Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> nn.Parameter:
    """Make a DTensor of a parameter that is equal on all ranks, and keep its Python attributes. Nothing is sent."""
    local = sharding.local_of(p.detach())  # `p` may be a DTensor of another mesh: take this rank's part
    new = nn.Parameter(distribute_tensor(local, mesh, placements, src_data_rank=None), p.requires_grad)
    new.__dict__.update(p.__dict__)
    return new


def shard_like(value: Tensor, parameter: Tensor) -> Tensor:
    """Shard `value`, which is whole on every rank, as `parameter` is sharded. If the shapes differ, replicate `value`.

    Nothing is sent, since each rank keeps its own shard.
    """
    if not isinstance(parameter, DTensor) or isinstance(value, DTensor):
        return value
    if value.shape == parameter.shape:
        part = local_part(parameter, value.detach().__getitem__).clone(memory_format=torch.contiguous_format)
        return sharding.with_local(parameter, part.to(parameter.device))
    mesh = parameter.device_mesh
    sharded = distribute_tensor(value.detach(), mesh, [Replicate()] * mesh.ndim, src_data_rank=None)
    return sharded if sharded.device == parameter.device else sharded.to(parameter.device)
