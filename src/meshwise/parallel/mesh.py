"""Build the device mesh: a run's devices on named axes.

Each technique names the axis over which it communicates.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from meshwise.spec.errors import PlanError
from meshwise.spec.plan import AXES, Plan
from meshwise.spec.world import World
from meshwise.torch_compat.dispatch import real_values
from meshwise.transfer import collectives, stages

WITHIN_SAMPLES = ("pipeline", "context", "tensor")
"""The mesh axes on which ranks work on the same samples. These axes are the innermost axes of the mesh."""
_meshes: dict[tuple[tuple[str, int], ...], DeviceMesh] = {}


def make_mesh(plan: Plan, world: World, *, replicas: bool = False) -> DeviceMesh:
    """Return the mesh of the run's devices, with one named axis for each way in which `plan` divides work."""
    shapes = {axis: getattr(plan, axis) for axis in AXES}
    needed = plan.split or plan.expert > 1
    kept = {axis: size for axis, size in shapes.items() if size > 1 or (axis == "shard" and needed)} or {"shard": 1}
    key = (*kept.items(), ("replicas", int(replicas and plan.expert > 1)))
    if key not in _meshes or _meshes[key].device_type != world.kind:
        with real_values():
            _meshes[key] = _made(plan, world, kept, replicas and plan.expert > 1)
    return _meshes[key]


def forget_meshes() -> None:
    """Delete all cached meshes. Called after the process group is gone, so that new meshes are made for the next
    group."""
    _meshes.clear()


def mesh_of_stage(plan: Plan, world: World) -> DeviceMesh:
    """Return the submesh of the devices that hold this rank's pipeline stage."""
    mesh = make_mesh(plan, world, replicas=True)
    names = tuple(name for name in mesh.mesh_dim_names or () if name != "pipeline")
    return mesh[names] if 0 < len(names) < mesh.ndim else mesh


def _made(plan: Plan, world: World, kept: dict[str, int], replicas: bool) -> DeviceMesh:
    if not replicas:
        return init_device_mesh(world.kind, tuple(kept.values()), mesh_dim_names=tuple(kept))
    ranks = torch.arange(plan.devices).view(plan.data, plan.shard, plan.expert).transpose(1, 2)
    return DeviceMesh(world.kind, ranks.reshape(-1, plan.shard), mesh_dim_names=("data", "shard"))


def divide_work(plan: Plan, world: World) -> World:
    """Return a `World` in which a group of ranks that hold one split model counts as one rank. These ranks work on the
    same samples, e.g. 8 ranks with tensor=2 divide a batch in 4.

    From now on, collectives run by default over ranks with different samples. Collective if the plan splits models.
    """
    together = plan.within_samples
    stages.join_pipe(None)
    if together == 1 or world.size == 1:
        collectives.divide_among(None)
        return replace(world, shares=plan.shares)
    if world.size % together:
        raise PlanError(f"{plan} needs a multiple of {together} devices, but there are {world.size}.")
    groups = [collectives.group_of(range(first, world.size, together)) for first in range(together)]
    collectives.divide_among(groups[world.rank % together])
    if plan.pipeline > 1:
        _join_pipe(plan, world)
    return replace(world, rank=world.rank // together, size=world.size // together, shares=plan.shares)


def _join_pipe(plan: Plan, world: World) -> None:
    """Make three process groups for each pipeline, and use the groups of this rank's pipeline."""
    apart = plan.within_samples // plan.pipeline  # the distance between neighbors on the pipeline axis
    own = world.rank // apart % plan.pipeline
    for first in range(world.size):
        if first // apart % plan.pipeline == 0:
            ranks = range(first, first + apart * plan.pipeline, apart)
            groups = [collectives.group_of(ranks) for _ in range(3)]
            if world.rank in ranks:
                same = tuple(rank for rank in range(world.size) if rank // apart % plan.pipeline == own)
                stages.join_pipe(stages.Pipe(own, plan.pipeline, groups[0], groups[1], groups[2], same))
