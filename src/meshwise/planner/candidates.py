"""List the plans that a search chooses from.

The plans differ in their meshes, microbatches, recompute and other options that save memory.

They do not change the numerical results of a job: its precision, its global batch and its batch norms stay the same,
unless the user allows a change.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from meshwise.spec.errors import PlanError
from meshwise.spec.plan import Plan
from meshwise.spec.plan_settings import plan_from_settings

MICROBATCHES = 4
"""Microbatches per pipeline stage. The bubble of 1F1B, (stages - 1) / microbatches, is then below a fourth."""
MOST_TENSOR = 8
"""The largest `tensor` axis to search. On several hosts, its collectives cost more than they save."""


@dataclass(frozen=True)
class Space:
    """The plans that a search may try."""

    devices: Sequence[int]
    per_host: int
    batch: int
    settings: tuple[str, ...] = ()
    allow: Collection[str] = ()
    batch_norms: bool = False
    cut: bool = True

    @property
    def microbatches(self) -> bool:
        """Whether to also try more microbatches than the pipeline stages need."""
        return self.cut and (not self.batch_norms or "microbatch" in self.allow)

    @property
    def fixed(self) -> set[str]:
        """The names of the plan fields that `settings` sets."""
        return {setting.partition("=")[0].strip() for setting in self.settings}


def candidates(space: Space) -> list[Plan]:
    """Return the plans to search, in the order to try them."""
    found: dict[Plan, None] = {}
    for count in space.devices:
        for mesh in _meshes(count, space.per_host):
            if mesh["pipeline"] > 1 and not space.cut:
                continue
            microbatches = _microbatches(mesh, space)
            possible = [edit for edit in _edits() if _made((), mesh | edit | {"accumulate": microbatches[-1]}, Plan())]
            for edit, accumulate in itertools.product(possible, microbatches):
                values = mesh | edit | {"accumulate": accumulate}
                values = {name: value for name, value in values.items() if name not in space.fixed}
                plan = _made(space.settings, values, Plan())
                if plan is not None and plan.devices in space.devices and _divides(plan, space.batch):
                    found.setdefault(plan)
    return sorted(found, key=_order)


def _edits() -> list[dict[str, Any]]:
    """Return all combinations of the options that techniques propose to try with a mesh."""
    edits: list[dict[str, Any]] = [{}]
    for field in fields(Plan):
        edits += [edit | {field.name: value} for edit in edits for value in field.metadata.get("tries", ())]
    return edits


def savers(plan: Plan, space: Space) -> list[Plan]:
    """Return variants of `plan` that need less memory but more time. The variants that add the least time come
    first."""
    local = space.batch // plan.replicas
    more = [power for power in _powers(local) if power > plan.accumulate and local % power == 0]
    edits: list[dict[str, Any]] = [{f.name: f.metadata["saves"]} for f in fields(Plan) if f.metadata.get("saves")]
    edits += [{"accumulate": power} for power in more] if space.microbatches else []
    edits += [{"precision": "bf16"}] if "precision" in space.allow and plan.precision == "fp32" else []
    edits += [edit | {"recompute": "full"} for edit in edits if "recompute" not in edit]
    edits += [{"offload": ("optimizer",), **edit} for edit in [{}, {"recompute": "full"}, *edits[-1:]]]
    found: dict[Plan, None] = {}
    for edit in edits:
        if not space.fixed & edit.keys():
            changed = _made((), edit, plan)
            if changed is not None and changed != plan:
                found.setdefault(changed)
    return list(found)


def _made(settings: Sequence[str], values: Mapping[str, Any], start: Plan) -> Plan | None:
    """Return `start` with the fields `values` replaced, then changed by `settings`.
    Return None for an invalid plan."""
    try:
        return plan_from_settings(settings, replace(start, **values))
    except PlanError:
        return None


def _meshes(count: int, per_host: int) -> Iterator[dict[str, int]]:
    """Yield all meshes to try for `count` devices, each as a dictionary of sizes by axis."""
    for tensor, pipeline in itertools.product(_powers(min(count, per_host, MOST_TENSOR)), _powers(count)):
        rest, over = divmod(count, tensor * pipeline)
        if over:
            continue
        within = max(1, per_host // tensor)
        for shard in sorted({1, rest, within if rest % within == 0 else 1}):
            yield {"data": rest // shard, "shard": shard, "pipeline": pipeline, "tensor": tensor}


def _microbatches(mesh: Mapping[str, int], space: Space) -> list[int]:
    """Return the numbers of microbatches to try on a mesh."""
    local, stages = max(1, space.batch // (mesh["data"] * mesh["shard"])), mesh["pipeline"]
    possible = [power for power in _powers(local) if local % power == 0 and power >= stages]
    if space.microbatches:
        return possible or [stages]
    return [max([stages, *(power for power in possible if power <= MICROBATCHES * stages)])] if stages > 1 else [1]


def _divides(plan: Plan, batch: int) -> bool:
    """Return whether every rank gets equally many samples of each microbatch."""
    return batch % (plan.replicas * plan.accumulate) == 0


def _order(plan: Plan) -> tuple[int, ...]:
    recompute = plan.recompute != "full", plan.recompute != "selective"
    return -plan.devices, plan.tensor * plan.pipeline, -plan.shard, plan.accumulate, *recompute


def _powers(most: int) -> list[int]:
    """Return the powers of two up to `most`: 1, 2, 4 …"""
    return [2**power for power in range(max(1, most).bit_length())]
