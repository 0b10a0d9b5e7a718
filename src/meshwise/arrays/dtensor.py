"""Convert between arrays over ranks and torch's DTensor.

Nothing is copied if both divide the elements in the same way.

DTensor is imported only where it is used, since the import takes a second.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from meshwise.arrays.aliases import FOREIGN
from meshwise.arrays.array import Alias, Array
from meshwise.arrays.dtypes import refuse_gradients
from meshwise.arrays.moves import agreed, replicate, reshard
from meshwise.arrays.sharding import sharding
from meshwise.arrays.space import Space
from meshwise.spec.errors import UsageError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor


def to_dtensor(x: Array, mesh: DeviceMesh, /) -> DTensor:
    """Convert `x` to a DTensor on a device mesh of one axis over all ranks."""
    from torch.distributed.tensor import DTensor, Replicate, Shard

    _check(x.space, mesh, "to_dtensor")
    if x.sharding.dim is None:
        whole = replicate(x, operation="to_dtensor").parts[0]
        return DTensor.from_local(whole, mesh, [Replicate()], run_check=False)
    dim, ranks = x.sharding.dim, len(x.space.places)
    each = -(-x.shape[dim] // ranks)
    sizes = tuple(max(0, min(each, x.shape[dim] - each * rank)) for rank in range(ranks))
    own = reshard(x, sharding(x.space.places, dim, sizes), "to_dtensor").parts[0].contiguous()
    stride = tuple(_stride(x.shape))
    return DTensor.from_local(own, mesh, [Shard(dim)], run_check=False, shape=torch.Size(x.shape), stride=stride)


def from_dtensor(space: Space, x: Any, /) -> Array:
    """Convert a DTensor to an array that shares memory with the DTensor's local tensor."""
    from torch.distributed.tensor import DTensor, Shard

    if not isinstance(x, DTensor):
        raise UsageError(f"from_dtensor takes a DTensor, not {type(x).__name__}. For other values write xp.asarray.")
    refuse_gradients("from_dtensor", x.requires_grad)
    _check(space, x.device_mesh, "from_dtensor")
    (placement,) = x.placements
    own, shape = x.to_local(), tuple(x.shape)
    placed = sharding(space.places)
    if not placement.is_replicate():
        if type(placement) is not Shard:
            raise UsageError(f"from_dtensor: placement must be Shard or Replicate, not {placement}. Use redistribute.")
        dim = placement.dim % len(shape)
        placed = sharding(space.places, dim, tuple(agreed(space, [own.shape[dim]], "from_dtensor")))
    found = Array((own,), placed, shape, x.dtype, space)
    found.alias = Alias(FOREIGN)
    return found


def _check(space: Space, mesh: DeviceMesh, verb: str) -> None:
    if not space.over_ranks:
        raise UsageError(f"{verb} works only over several ranks. In one process, use x.torch() or x.full_tensor().")
    if mesh.ndim != 1 or mesh.mesh.flatten().tolist() != list(space.places):
        raise UsageError(f"{verb}: the mesh must have one dim, with all {len(space.places)} ranks in ascending order.")


def _stride(shape: tuple[int, ...]) -> list[int]:
    """Return the strides of a contiguous tensor of this shape, in elements."""
    strides = [1]
    for length in reversed(shape[1:]):
        strides.insert(0, strides[0] * max(length, 1))
    return strides[: len(shape)]


METHODS = {"to_dtensor": to_dtensor}
MAKERS = {"from_dtensor": from_dtensor}
