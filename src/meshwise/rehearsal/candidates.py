"""The plans that a search rehearses: meshes, microbatches, recompute and offload, the simplest first.

Nothing here changes the numbers of a job: its precision, its global batch and its batch norms stay, unless they are
allowed to change.

Tested in tests/rehearsal/test_candidates.py.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from meshwise.spec.errors import PlanError
from meshwise.spec.plan import AXES, Plan
from meshwise.spec.plan_settings import plan_from_settings

SEARCHED = ("data", "shard", "pipeline", "tensor")
"""The mesh axes that a search varies. Others are taken as they are given."""
MOST_TENSOR = 8
"""Devices that split a layer, at most: beyond a host its collectives cost more than they save."""


@dataclass(frozen=True)
class Space:
    """What may be searched. devices: counts of devices; per_host: devices of a host. batch: samples of the global
    batch. settings: `field=value` texts that every plan has. allow: what may change numbers: `precision`,
    `microbatch` (under batch norms). batch_norms: whether the model has some."""

    devices: Sequence[int]
    per_host: int
    batch: int
    settings: tuple[str, ...] = ()
    allow: Collection[str] = ()
    batch_norms: bool = False


def candidates(space: Space) -> list[Plan]:
    """The plans of a space, those that are likely best first: more devices, less splitting, fewer microbatches."""
    fixed = {setting.partition("=")[0].strip() for setting in space.settings}
    found: dict[Plan, tuple[Any, ...]] = {}
    for count in space.devices:
        for mesh in _meshes(count, space.per_host):
            for more in _techniques(mesh, space):
                values = {name: value for name, value in (mesh | more).items() if name not in fixed}
                try:
                    plan = plan_from_settings(space.settings, Plan(**values))
                except PlanError:
                    continue
                if plan.devices in space.devices and _divides(plan, space.batch):
                    found.setdefault(plan, _order(plan, space))
    return sorted(found, key=lambda plan: found[plan])


def _meshes(count: int, per_host: int) -> Iterator[dict[str, int]]:
    """Ways to lay `count` devices on the axes. `data` and `shard` are together all of what is left, or hosts × a
    host."""
    for tensor, pipeline in itertools.product(_powers(min(count, per_host, MOST_TENSOR)), _powers(count)):
        rest, over = divmod(count, tensor * pipeline)
        if over:
            continue
        within = max(1, per_host // tensor)
        hybrid = {within} if rest % within == 0 else set()
        for shard in sorted({1, rest, *hybrid}):
            if rest % shard == 0:
                yield {"data": rest // shard, "shard": shard, "pipeline": pipeline, "tensor": tensor}


def _techniques(mesh: dict[str, int], space: Space) -> Iterator[dict[str, Any]]:
    local = max(1, space.batch // (mesh["data"] * mesh["shard"]))
    microbatches = [1] if space.batch_norms and "microbatch" not in space.allow else _powers(local)
    states = [{}, {"zero1": True}] if mesh["data"] > 1 and mesh["shard"] == mesh["tensor"] == 1 else [{}]
    precisions = ("fp32", "bf16") if "precision" in space.allow else ("fp32",)
    for accumulate, recompute, state, offload, precision in itertools.product(
        microbatches, ("none", "full"), states, ((), ("optimizer",)), precisions
    ):
        yield {"accumulate": accumulate, "recompute": recompute, "offload": offload, "precision": precision, **state}


def _divides(plan: Plan, batch: int) -> bool:
    """Whether every rank has as many samples of each microbatch as the others."""
    return batch % (plan.devices // plan.within_samples * plan.accumulate) == 0


def _order(plan: Plan, space: Space) -> tuple[Any, ...]:
    split = sum(getattr(plan, axis) > 1 for axis in AXES)
    saves = (plan.recompute != "none") + 2 * bool(plan.offload)
    return (saves, -plan.devices, split, plan.tensor * plan.pipeline, plan.accumulate, plan.zero1, plan.data)


def _powers(most: int) -> list[int]:
    """1, 2, 4 … up to `most`."""
    return [2**power for power in range(max(1, most).bit_length())]
