"""Choose how few blocks and pipeline stages to trace.

The stages between the first and the last do the same, each on its own blocks and with its own neighbors. A pipeline of
four stages is traced. Its trace of a stage is moved to the stages of the deeper pipeline that do the same.
"""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace

from meshwise.parallel.schedule import CHUNKS, orders
from meshwise.planner.extrapolate import COUNT, GrowthAxis
from meshwise.planner.insertions import NotExtrapolable
from meshwise.planner.repeat_microbatches import LEAST, Composer, Move, check_equal, composer
from meshwise.planner.repeat_pieces import Order
from meshwise.planner.shorter import Stretch
from meshwise.planner.trace import THIRD, Extent, Trace
from meshwise.planner.work import Allocate, CollectiveOperation, Launch, Work
from meshwise.spec.plan import AXES, Plan

FEW = 3
"""How many groups of blocks per pipeline stage are traced, to extrapolate to all groups. The first and the last group
are special, so a third group between them is traced, too. Under shard, a fourth group is traced, because a rank may
hold three neighboring blocks in memory at once."""


@dataclass(frozen=True)
class Depth:
    """The number of groups of blocks in a pipeline stage, for the real model and for a shorter model that is traced
    instead."""

    own: int
    few: int
    stages: int


def depth_of(plan: Plan, stretch: Stretch, shared: bool = False) -> Depth | None:
    """Return how many groups of blocks to trace to extrapolate the others, or None to trace all of them."""
    stages = plan.pipeline * CHUNKS.get(plan.schedule, 1) if plan.pipeline > 1 else 1
    if (
        isinstance(plan.recompute, tuple)
        or plan.state_parts > 1  # each parameter has an owner rank, so no blocks are alike
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
        """Return which block contains a module (-1: none), and the rest of the module's name."""
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


ELEMENT = 8  # a parameter of at most this many bytes counts as a single element
Actions = Callable[[int], list[Order]]  # maps a number of microbatches to a stage's actions in a step
FEW_STAGES = 4
"""How many stages are traced: the first, the last, and two in between, to check that these two do the same."""
FEW_COPIES = 2
"""The most replicas on the axis `data` in a trace of few stages. So plans with more replicas share the trace."""


@dataclass(frozen=True)
class Stages:
    """The stages of a plan. Only a few of them are traced."""

    plan: Plan
    blocks: int

    @functools.cached_property
    def few(self) -> Plan:
        """The plan that is traced, except for its number of microbatches."""
        return with_few(self.plan, pipeline=FEW_STAGES, data=min(self.plan.data, FEW_COPIES))

    @property
    def begun(self) -> int | None:
        """The fewest microbatches with which the first two stages act as in the plan, if the plan fills its pipeline
        only once (see `fills_once`). None otherwise."""
        return FEW_STAGES + self.plan.accumulate - self.plan.pipeline if fills_once(self.plan) else None

    @property
    def sort(self) -> Plan:
        """A key that plans with the same kinds of stages share: the traced plan with small axes and one microbatch."""
        axes = {axis: min(getattr(self.few, axis), 2) for axis in AXES if axis != "pipeline"}
        return with_few(self.few, **axes, accumulate=1)

    @property
    def apart(self) -> int:
        """How many ranks apart two neighboring stages of a pipeline are."""
        return self.plan.within_samples // self.plan.pipeline

    def needs_less(self, stage: int) -> bool:
        """Return whether a stage does the same as the previous stage, and never has more microbatches in flight."""
        return self.plan.schedule == "1f1b" and self.like(stage) == self.like(stage - 1)

    def like(self, stage: int) -> int:
        """Return which traced stage does the same as this stage of the pipeline: 0 (first), 1 (second), 2 (last)."""
        return 0 if stage == 0 else 2 if stage == self.plan.pipeline - 1 else 1

    def move(self, rank: int, stage: int, axis: GrowthAxis) -> Move:
        """Return a function that moves events of a traced rank to a stage of the real pipeline."""
        traced = self._stage(rank)
        by = (stage - traced) * self.blocks

        @functools.cache
        def what(old: CollectiveOperation) -> CollectiveOperation:
            return replace(old, ranks=tuple(self._ranks(old, traced, stage)))

        def moved(event: Launch) -> Launch:
            number, module = axis.read(event)[1], event.module
            if number is not None and number // self.blocks >= traced:  # blocks of earlier stages keep their names
                module = axis.write(event, number + by)[0]
            same = what(event.what) if isinstance(event.what, CollectiveOperation) else event.what
            if same is event.what and module == event.module:
                return event
            return Launch(same, event.stream, event.phase, module, event.microbatch, event.after, event.blocks)

        return moved

    def moved(self, trace: Trace, stage: int) -> Trace:
        """Return `trace`, whose events are already moved, as the trace of a stage of the real pipeline."""

        def work(old: Work) -> Work:
            (rank,) = self._at([old.rank], stage)
            notes = tuple(note for note in old.notes if not note.startswith("pipeline=") and not COUNT.search(note))
            return replace(old, rank=rank, ranks=self.plan.devices, notes=notes)

        found = replace(trace, first=work(trace.first), step=work(trace.step))
        return found if trace.launches_alone else self._with_absent(found)

    def _with_absent(self, trace: Trace) -> Trace:
        """Add the single elements that parameters of blocks on other stages leave in memory."""
        more, absent = (self.plan.pipeline - FEW_STAGES) * self.blocks, (FEW_STAGES - 1) * self.blocks
        if not more:
            return trace
        run = max(_runs(trace.first.held), key=len, default=[])
        each = run[: len(run) // absent]
        known = run and all(run[-1] in work.held for work in (trace.first, trace.step))
        if not known or [one.size for one in run] != [one.size for one in each] * absent:
            raise NotExtrapolable("the blocks of other stages leave unlike elements in memory")
        used = [
            event.storage
            for work in (trace.first, trace.step)
            for event in (*work.held, *work.events)
            if not isinstance(event, Launch)
        ]
        added = [replace(one, storage=number) for number, one in enumerate(each * more, max(used) + 1)]

        def held(old: tuple[Allocate, ...]) -> tuple[Allocate, ...]:
            at = old.index(run[-1]) + 1
            return (*old[:at], *added, *old[at:])

        first, step = (replace(work, held=held(work.held)) for work in (trace.first, trace.step))
        return replace(trace, first=first, step=step)

    def _ranks(self, old: CollectiveOperation, traced: int, stage: int) -> Iterable[int]:
        """Return the ranks of a collective in the real run."""
        few, many = self.few.devices // self.few.data, self.plan.devices // self.plan.data  # devices of one replica
        first = replace(old, ranks=tuple(rank for rank in old.ranks if rank < few))
        found = list(self._of_copy(first, traced, stage))
        if first == old:
            return found
        if old.ranks != tuple(rank + few * copy for copy in range(self.few.data) for rank in first.ranks):
            raise NotExtrapolable(f"a collective {old.kind} of some of the copies that the axis data makes")
        return [rank + many * copy for copy in range(self.plan.data) for rank in found]

    def _of_copy(self, old: CollectiveOperation, traced: int, stage: int) -> Iterable[int]:
        """Like `_ranks`, for a collective of one replica on the axis `data`."""
        stages = {self._stage(rank) for rank in old.ranks}
        if stages == {traced}:
            return self._at(old.ranks, stage)
        if old.kind in ("send", "receive"):
            return [self._at([rank], stage + self._stage(rank) - traced)[0] for rank in old.ranks]
        first = [rank for rank in old.ranks if self._stage(rank) == 0]
        if stages == set(range(FEW_STAGES)) and old.kind in ("all-reduce", "broadcast"):
            return sorted(rank for number in range(self.plan.pipeline) for rank in self._at(first, number))
        if stages == {0, FEW_STAGES - 1}:
            return sorted(rank for number in (0, self.plan.pipeline - 1) for rank in self._at(first, number))
        raise NotExtrapolable(f"a collective {old.kind} of the stages {sorted(stages)}")

    def _stage(self, rank: int) -> int:
        return rank // self.apart % FEW_STAGES

    def _at(self, ranks: Iterable[int], stage: int) -> list[int]:
        """Return the ranks at `stage` of the real run that correspond to traced ranks."""
        apart, found = self.apart, []
        for rank in ranks:
            replica, place = rank // (FEW_STAGES * apart), rank % apart
            found.append((replica * self.plan.pipeline + stage) * apart + place)
        return found


def _runs(held: Sequence[Allocate]) -> list[list[Allocate]]:
    """Return each run of consecutive parameters with a single element."""
    runs = itertools.groupby(held, lambda one: one.category == "parameters" and one.size <= ELEMENT)
    return [list(run) for single, run in runs if single]


def check_third(found: Sequence[Trace], stages: Stages, count: int, axis: GrowthAxis) -> None:
    """Raise NotExtrapolable if the third traced stage does not run the same operators as the second."""
    move = stages.move(found[1].step.rank, THIRD, axis)
    made = composer(found[1], {})(actions_of(stages.plan, THIRD)(count), range(0), move)
    check_equal(found[THIRD], stages.moved(made, THIRD))


def without_third(found: Sequence[Trace], few: bool) -> list[Trace]:
    """Remove the trace of the third of FEW_STAGES stages. few: whether the traced stages stand for more."""
    return [*found[:THIRD], *found[THIRD + 1 :]] if few and len(found) == FEW_STAGES else list(found)


def with_all_stages(
    make: Callable[[int], Composer],
    stages: Stages,
    ranks: Sequence[int],
    axis: GrowthAxis,
    runs: int,
    extent: Extent,
) -> list[Trace]:
    """Return the traces of all stages of a plan with many microbatches."""

    def made(stage: int) -> Trace:
        like = stages.like(stage)
        actions, left_out = with_left_out(actions_of(stages.plan, stage), stages.plan.accumulate, runs)
        move = stages.move(ranks[like], stage, axis)
        alone = extent == "launches" or (extent == "brief" and stages.needs_less(stage))
        return stages.moved(make(stage)(actions, left_out, move, alone), stage)

    return [made(stage) for stage in range(stages.plan.pipeline)]


def fills_once(plan: Plan) -> bool:
    """Return whether a plan has so few microbatches that its first stage gets the last microbatch before the first
    backward, or right after it. With `shard`, what an action does depends on that."""
    return plan.shard > 1 and plan.pipeline > 1 and plan.schedule == "1f1b" and plan.accumulate <= plan.pipeline + 1


def stage_of(plan: Plan, rank: int) -> int:
    """Return the pipeline stage of a rank."""
    return rank % plan.within_samples // (plan.within_samples // plan.pipeline)


def actions_of(plan: Plan, stage: int) -> Actions:
    """Return a function that maps a number of microbatches to a stage's actions in a step."""

    def of(count: int) -> list[Order]:
        return [(each.forward, each.microbatch) for each in orders(plan.schedule, plan.pipeline, count)[stage]]

    return of


def with_left_out(orders: Callable[[int], Sequence[Order]], count: int, runs: int) -> tuple[list[Order], range]:
    """Return the actions of a step of `count` microbatches, and the range of those left out so that `runs` remain."""
    if runs >= count:
        return list(orders(count)), range(0)
    left_out = range(LEAST, LEAST + count - runs)
    run = [(forward, number if number < LEAST else number + len(left_out)) for forward, number in orders(runs)]
    at = next(place for place, (_, number) in enumerate(run) if number >= left_out.stop)
    return [*run[:at], *((forward, number) for number in left_out for forward in (True, False)), *run[at:]], left_out


def with_few(plan: Plan, **changes: int) -> Plan:
    """Return the plan with other numbers of microbatches and stages."""
    found = copy.copy(plan)
    for name, value in changes.items():
        object.__setattr__(found, name, value)
    return found
