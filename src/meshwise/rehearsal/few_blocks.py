"""Choose how few blocks of a deep model to trace.

Tested in tests/rehearsal/test_replay.py.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable
from dataclasses import dataclass

from meshwise.parallel.schedule import CHUNKS
from meshwise.rehearsal.replay import GrowthAxis
from meshwise.rehearsal.shorter import Stretch
from meshwise.rehearsal.work import Launch
from meshwise.spec.plan import Plan

FEW = 3
"""How many groups of blocks per pipeline stage are traced, to extrapolate to all groups. The first and the last group
are special, so a third group between them is traced, too. Under shard, a fourth group is traced, because a rank may
hold three neighboring blocks in memory at once."""


@dataclass(frozen=True)
class Depth:
    """The number of groups of blocks in a pipeline stage, for the real model and for a shorter model that is traced
    instead.

    A group is the shortest sequence of blocks that the model repeats, often a single block.

    own: the number of groups per stage in the real model.
    few: the number of groups per stage in the shorter model.
    stages: the number of pipeline stages.
    """

    own: int
    few: int
    stages: int


def depth_of(plan: Plan, stretch: Stretch, shared: bool = False) -> Depth | None:
    """Return how many groups of blocks to trace, so that the others can be extrapolated."""
    stages = plan.pipeline * CHUNKS.get(plan.schedule, 1) if plan.pipeline > 1 else 1
    if (
        isinstance(plan.recompute, tuple)
        or plan.state_parts > 1  # whole parameters have owners: no two blocks are alike
        or (stages > 1 and not (stretch.is_whole and stretch.group == 1 and stretch.count % stages == 0))
    ):
        return None
    own, few = stretch.count // stages, FEW + (plan.shard > 1)
    return Depth(own, few, stages) if own > (few if shared else 2 * few + 1) else None


def blocks_axis(stretch: Stretch) -> GrowthAxis:
    """Return a `GrowthAxis`, which finds the group of blocks to which a launch belongs."""
    places = {name: place - stretch.start for place, name in enumerate(stretch.names)}

    @functools.cache
    def known(module: str) -> tuple[int, str]:
        """Return (n, name): `module` is in block n of `stretch`, and `name` is the rest of its name, such as ".linear".
        n is -1 if the module is outside of `stretch`."""
        name = module
        while name and name not in places:
            name = name.rpartition(".")[0]
        place = places.get(name, -1)
        return (place, module[len(name) :]) if 0 <= place < stretch.count * stretch.group else (-1, module)

    def read(launch: Launch) -> tuple[Hashable, int | None]:
        place, rest = known(launch.module)
        if place < 0:
            return (launch.module, launch.microbatch), None
        return (place % stretch.group, rest, launch.microbatch), place // stretch.group

    def write(launch: Launch, number: int) -> tuple[str, int]:
        place, rest = known(launch.module)
        return stretch.names[stretch.start + number * stretch.group + place % stretch.group] + rest, launch.microbatch

    return GrowthAxis(read, write)
