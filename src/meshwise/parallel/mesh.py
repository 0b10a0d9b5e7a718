"""The mesh: the devices of a run on named axes, so that a technique says over which axis it communicates.

Tested in tests/parallel/test_apply.py.
"""

from __future__ import annotations

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from meshwise.spec.plan import AXES, Plan
from meshwise.spec.world import World


def make_mesh(plan: Plan, world: World) -> DeviceMesh:
    """The devices of `world` on the axes that `plan` divides, outermost first, each by its name. Collective.

    Ranks count up along the last axis first. Launchers number the devices of a host one after the other, so what
    communicates most, `shard`, uses the fastest links. An axis of size 1 is left out; one device has `shard` alone.
    """
    names = tuple(axis for axis in AXES if getattr(plan, axis) > 1) or AXES[-1:]
    return init_device_mesh(world.kind, tuple(getattr(plan, axis) for axis in names), mesh_dim_names=names)
