"""Build traces of deep models from traces of few blocks.

If the blocks are alike, the result equals a trace of the whole model.

Two models that differ by one block on each pipeline stage are traced. The trace of the real model is extrapolated from
them. If that cannot be exact, all blocks are traced.

Tested in tests/rehearsal/test_replay.py.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from meshwise.compat.fake import FakeTensors, real_values
from meshwise.compat.fake_values import fake_batch, fake_without_values
from meshwise.compat.tree import tensors_in
from meshwise.data.order import epoch_order, epoch_slices
from meshwise.data.source import read_slices
from meshwise.job.job import Job
from meshwise.job.run import open_data
from meshwise.parallel.batch_norm import normalises
from meshwise.parallel.schedule import CHUNKS
from meshwise.rehearsal.few_stages import (
    FEW_STAGES,
    Stages,
    actions_of,
    stage_of,
    with_all_stages,
    with_few,
    with_left_out,
)
from meshwise.rehearsal.growth import Unlike
from meshwise.rehearsal.microbatches import LEAST, composer, growth_of
from meshwise.rehearsal.replay import MICROBATCHES, GrowthAxis, lengthened
from meshwise.rehearsal.shorter import Forward, Heard, Stretch, shortened, stretch_of
from meshwise.rehearsal.trace import STEPS, Trace, trace
from meshwise.rehearsal.work import Launch
from meshwise.spec.errors import MeshwiseError, UsageError
from meshwise.spec.plan import Plan
from meshwise.spec.world import World

FEW = 3
"""How many groups of blocks per pipeline stage are traced, to extrapolate to all groups. The first and the last group
are special, so a third group between them is traced, too. Under shard, a fourth group is traced, because a rank may
hold three neighboring blocks in memory at once."""
KEPT = 6
"""How many traces of few stages are kept for plans that share them. A plan needs three."""
AROUND = 2
"""If microbatches of a pipeline are left out, as many run as it has stages, LEAST before, and these, so that two on
each side of those that are left out follow each other as evenly as they do."""
FEW_MICROBATCHES = 3
"""How many microbatches are traced without a pipeline, to extrapolate to all microbatches."""


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


@dataclass(frozen=True)
class Facts:
    """Facts about a model.

    stretch: the longest sequence of equal blocks. None if no two neighboring blocks are equal.
    batch_norms: whether the model contains batch norms.
    parameters: the bytes of all parameters.
    trained: the bytes of the parameters that require gradients.
    wide: the number of elements of all float32 parameters.
    forward: the FLOPs and bytes of a forward pass on a global batch.
    stepped: the bytes that an optimizer step reads and writes, divided by the bytes of the parameters. For example,
        about 7 for Adam. It is 0 if this is unknown.
    """

    stretch: Stretch | None
    batch_norms: bool
    parameters: int
    trained: int
    wide: int = 0
    forward: Forward = field(default_factory=Forward)
    stepped: float = 0.0


@dataclass(frozen=True)
class _Asked:
    """What to trace: the arguments of `trace`."""

    job: Job
    plan: Plan
    kind: str
    speeds: Sequence[Hashable]
    marked: bool = False


class Tracer:
    """Traces plans of one job like `trace`, but faster if blocks or microbatches are alike.

    It then traces only a few blocks or microbatches and extends the trace to all of them, which gives the same result.
    """

    def __init__(self, job: Job) -> None:
        """job: the job whose plans are traced. Its data is opened once for all plans, and read without worker
        processes.
        """
        self.job = replace(job, data=functools.cache(job.data), loader_workers=0)
        self.batch_size = job.batch_size
        self._kept: dict[Hashable, list[Trace]] = {}

    def __call__(self, plan: Plan, kind: str, speeds: Sequence[Hashable] = (), brief: bool = False) -> list[Trace]:
        """Trace the job's step under a plan. Return one trace for each group of ranks that do the same work, as `trace`
        does.

        Raises PlanError for a plan that cannot run, and UsageError for a program that cannot be traced.

        kind: the kind of device, `gpu` or `cpu`.
        speeds: one value for each rank, equal for ranks with equal devices. By default, all devices are equal.
        brief: whether microbatches of a pipeline may be left out, see `Work.left_out`.
        """
        few, runs = microbatches_of(plan), plan.accumulate
        if brief and plan.schedule == "1f1b" and not speeds:
            runs = min(runs, LEAST + plan.pipeline + AROUND)
        if few is not None and self._reads_alike(plan):
            for stages in dict.fromkeys((self._few_stages(plan, speeds), None)):
                with contextlib.suppress(MeshwiseError, Unlike):  # others may have other values
                    return self._of_few(plan, kind, speeds, few, stages, runs)
        return self._replayed(_Asked(self.job, plan, kind, speeds))[0]

    def _of_few(
        self, plan: Plan, kind: str, speeds: Sequence[Hashable], few: int, stages: Stages | None, runs: int
    ) -> list[Trace]:
        """Trace a plan with `few` microbatches and, if `stages` is given, few pipeline stages. Extend the traces to all
        of them, but leave all but `runs` microbatches of a pipeline out. Raises Unlike if this is inexact."""
        traced, composes = plan if stages is None else stages.few, plan.pipeline > 1
        rows = self.batch_size // plan.accumulate // plan.data * traced.data
        short, long = (
            _Asked(replace(self.job, batch_size=rows * n), with_few(traced, accumulate=n), kind, speeds, composes)
            for n in (few, few + 1)
        )
        blocks = None if stages is None else stages.blocks * FEW_STAGES
        found, least, groups = self._replayed(short, blocks)
        if any(each.reads_values for each in found):
            raise Unlike("what runs may depend on the values of a batch")
        if not composes:
            pairs = zip(found, self._replayed(long, blocks)[0], strict=True)
            return [lengthened(*two, plan.accumulate - few, MICROBATCHES) for two in pairs]
        more = self._traced(long, groups)
        actions = [actions_of(short.plan, stage_of(short.plan, each.step.rank)) for each in found]
        growth = [growth_of(*three) for three in zip(least, more, actions, strict=True)]
        make = functools.cache(lambda at: composer(found[at], growth[at]))
        if stages is not None and self.stretch is not None:
            return with_all_stages(make, stages, found, few, blocks_axis(self.stretch), runs)
        return [make(at)(*with_left_out(own, plan.accumulate, runs)) for at, own in enumerate(actions)]

    @functools.cached_property
    def stretch(self) -> Stretch | None:
        """The longest sequence of equal blocks of the model, or None."""
        with contextlib.suppress(MeshwiseError):  # as the trace of the whole model will say
            return self.model.stretch
        return None

    def _few_stages(self, plan: Plan, speeds: Sequence[Hashable]) -> Stages | None:
        """Return the stages of a plan of which few are traced. None if all must be traced."""
        stretch, alike = self.stretch, not (speeds or plan.zero1 or isinstance(plan.recompute, tuple))
        if stretch is None or plan.pipeline <= FEW_STAGES or not alike:
            return None
        even = stretch.is_whole and stretch.group == 1 and stretch.count % plan.pipeline == 0
        return Stages(plan, stretch.count // plan.pipeline) if even else None

    def _replayed(self, asked: _Asked, blocks: int | None = None) -> tuple[list[Trace], list[Trace], int | None]:
        """Trace a plan of a job. If possible, trace only a few blocks and extend the traces to all blocks.

        Return the traces, those of the fewest blocks that were traced, and how many groups of blocks these have.

        blocks: how many groups of equal blocks the model is to have. The default is all that it has.
        """
        stretch, depth = self.stretch, None
        if stretch is not None:
            depth = depth_of(asked.plan, stretch if blocks is None else stretch.beginning(blocks), blocks is not None)
        if stretch is not None and depth is not None:
            with contextlib.suppress(MeshwiseError, Unlike):  # what the whole model says is what counts
                least = depth.few * depth.stages
                short, long = (self._traced(asked, groups) for groups in (least, least + depth.stages))
                axis, buckets = blocks_axis(stretch), "optimizer" in asked.plan.offload
                pairs = zip(short, long, strict=True)
                return [lengthened(*two, depth.own - depth.few, axis, buckets) for two in pairs], short, least
        found = self._traced(asked, blocks)
        return found, found, blocks

    def _traced(self, asked: _Asked, groups: int | None) -> list[Trace]:
        """Trace a plan of a job whose model has so many groups of equal blocks. None for all that it has."""
        stretch, key = self.stretch, (asked.job.batch_size, asked.plan, asked.kind, tuple(asked.speeds), groups)
        if asked.marked and key in self._kept:
            return self._kept[key]
        job = asked.job if stretch is None or groups is None else shortened(asked.job, stretch, groups)
        found = trace(job, asked.plan, asked.kind, asked.speeds, asked.marked)
        if asked.marked:
            self._kept = dict([*self._kept.items(), (key, found)][-KEPT:])
        return found

    def _reads_alike(self, plan: Plan) -> bool:
        """Return whether all microbatches of the first replica in its first steps have tensors of the same shapes and
        dtypes."""
        data = open_data(self.job, self.job.data(), "training set")
        if data.samples < STEPS * self.batch_size or self.batch_size % (plan.replicas * plan.accumulate):
            return False
        order, world = epoch_order(self.job.seed, 0, data.samples), World(size=plan.replicas)
        steps = itertools.islice(epoch_slices(order, self.batch_size, world, plan.accumulate), STEPS)
        batches = (batch for step in steps for batch, _ in read_slices(data.read, step, 0))
        return len({tuple((t.shape, t.dtype) for t in tensors_in(batch)) for batch in batches}) == 1

    def _batch(self) -> Any:
        """Return the first global batch as fake tensors."""
        with real_values():
            data = open_data(self.job, self.job.data(), "training set")
            order = epoch_order(self.job.seed, 0, data.samples)
            step = next(epoch_slices(order, self.batch_size, World()))
            batch, _ = next(iter(read_slices(data.read, step, 0)))
        return fake_batch(batch)

    @functools.cached_property
    def model(self) -> Facts:
        """Facts about the job's model. They are found by building the model and running one forward pass on fake
        tensors. Raises UsageError if the model cannot be built on fake tensors."""
        heard = Heard()
        with FakeTensors(heard.on_operator, stands_for_real=True), fake_without_values():
            try:
                model = self.job.model()
            except MeshwiseError:
                raise
            except Exception as error:
                why = str(error).partition("\n")[0]
                raise UsageError(
                    f"job '{self.job.name}': the model cannot be built on fake tensors, which have shapes but no "
                    f"values: {why}. If the model reads a value of a tensor, compute this value with numpy or math."
                ) from error
            stretch = None
            with contextlib.suppress(Exception):  # modules of an unusual kind: the whole is traced
                if self.job.stage_cost is None:
                    heard.forward(model, lambda: self.job.loss(model, self._batch()))
                    stretch = stretch_of(model, heard.done)
            sizes = [(p.nbytes, p.requires_grad) for p in model.parameters()]
            trained = sum(size for size, learns in sizes if learns)
            wide = sum(p.numel() for p in model.parameters() if p.dtype == torch.float32)
            norms, size = any(map(normalises, model.modules())), sum(size for size, _ in sizes)
            return Facts(stretch, norms, size, trained, wide, heard.forward_comes_to)


def microbatches_of(plan: Plan) -> int | None:
    """Return how many microbatches to trace. Return None if all of them must be traced.

    All must be traced if tracing only a few would save nothing, if a rank's stages alternate (interleaved schedules),
    or if replicas have unequal shares of the batch.

    Without a pipeline, FEW_MICROBATCHES are enough. Of a pipeline, a step is composed of its microbatches. Under shard,
    a stage frees gathered parameters in its next action, so that each kind of action must follow each kind.
    """
    few = FEW_MICROBATCHES if plan.pipeline == 1 else LEAST
    alike = not plan.shares and (plan.pipeline == 1 or plan.schedule not in CHUNKS)
    if plan.pipeline > 1 and plan.shard > 1 and plan.schedule != "gpipe":
        few += min(plan.pipeline, FEW_STAGES) - 1
        alike = alike and plan.accumulate > plan.pipeline + 1  # else a stage's last forward follows a forward
    return few if alike and plan.accumulate * plan.pipeline > _few_parts(plan, few) else None


def parts_traced(plan: Plan) -> int:
    """Estimate how much work it is to trace a step under the plan: how many microbatches are traced, counted once for
    each pipeline stage that is traced. With tensor parallelism, the number is doubled."""
    few = microbatches_of(plan)
    return (plan.accumulate * plan.pipeline if few is None else _few_parts(plan, few)) * (2 if plan.tensor > 1 else 1)


def _few_parts(plan: Plan, few: int) -> int:
    """The same for `few` microbatches and one more. In a pipeline, the latter is traced at the fewest blocks alone."""
    return 2 * few + 1 if plan.pipeline == 1 else (3 * few + 1) * min(plan.pipeline, FEW_STAGES) // 2


def depth_of(plan: Plan, stretch: Stretch, shared: bool = False) -> Depth | None:
    """Return how many groups of blocks to trace, so that the others can be extrapolated. Return None if the whole model
    must be traced.

    The whole model must be traced if extrapolating would save little, or if the plan treats equal blocks differently.
    For example, `recompute` may name single blocks, or the pipeline stages may have different numbers of blocks.

    shared: whether plans with other numbers of blocks share the trace, so that it may save a little only.
    """
    stages = plan.pipeline * CHUNKS.get(plan.schedule, 1) if plan.pipeline > 1 else 1
    if (
        isinstance(plan.recompute, tuple)
        or plan.zero1
        or (stages > 1 and not (stretch.is_whole and stretch.group == 1 and stretch.count % stages == 0))
    ):
        return None
    own, few = stretch.count // stages, FEW + (plan.shard > 1)
    return Depth(own, few, stages) if own > (few if shared else 2 * few + 1) else None


def blocks_axis(stretch: Stretch) -> GrowthAxis:
    """Return a `GrowthAxis`, which finds the group of blocks to which a launch belongs.

    Groups are numbered from the beginning of `stretch`, the sequence of equal blocks in the whole model. Every pipeline
    stage uses the same numbers.
    """
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
