"""Build traces of deep models from traces of few blocks.

If the blocks are alike, the result equals a trace of the whole model.

Two models that differ by one block on each pipeline stage are traced. The trace of the real model is extrapolated from
them. If that cannot be exact, all blocks are traced.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from meshwise.parallel.batch_norm import normalises
from meshwise.parallel.schedule import CHUNKS
from meshwise.planner.extrapolate import MICROBATCHES, lengthened
from meshwise.planner.insertions import NotExtrapolable
from meshwise.planner.repeat_microbatches import LEAST, Composer, Growth, composer, growth_of, with_fewer, with_more
from meshwise.planner.shorter import Forward, ForwardRecorder, Stretch, shortened, stretch_of
from meshwise.planner.shrink import (
    FEW_STAGES,
    Actions,
    Stages,
    actions_of,
    blocks_axis,
    check_third,
    depth_of,
    fills_once,
    stage_of,
    with_all_stages,
    with_few,
    with_left_out,
    without_third,
)
from meshwise.planner.trace import STEPS, Extent, Trace, trace
from meshwise.spec.errors import MeshwiseError, UsageError
from meshwise.spec.plan import Plan
from meshwise.spec.world import World
from meshwise.torch_compat.dispatch import real_values
from meshwise.torch_compat.fake import FakeTensors
from meshwise.torch_compat.fake_values import fake_batch, fake_without_values
from meshwise.torch_compat.tree import tensors_in
from meshwise.training.data.order import epoch_order, epoch_slices
from meshwise.training.data.source import read_slices
from meshwise.training.job.job import Job
from meshwise.training.job.run import open_data

KEPT = 6
"""How many traces of few stages are kept for plans that share them. A plan needs two, or four if it fills its
pipeline once."""
AROUND = 2
"""If microbatches of a pipeline are left out, this many run besides LEAST and one per stage, so that two on each side
of the gap follow each other as evenly as those left out."""
FEW_MICROBATCHES = 3
"""How many microbatches are traced without a pipeline, to extrapolate to all microbatches."""


@dataclass(frozen=True)
class Facts:
    """Facts about a model."""

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
    third: bool | None = None


class Tracer:
    """Traces plans of one job like `trace`, but faster if blocks or microbatches are alike."""

    def __init__(self, job: Job) -> None:
        """job: the job whose plans are traced."""
        self.job = replace(job, data=functools.cache(job.data), loader_workers=0)
        self.batch_size = job.batch_size
        self._kept: dict[Hashable, list[Trace]] = {}
        self._alike: set[Hashable] = set()  # `Stages.sort` of plans whose third stage did the same as the second

    def __call__(self, plan: Plan, kind: str, speeds: Sequence[Hashable] = (), extent: Extent = "whole") -> list[Trace]:
        """Trace the job's step under a plan."""
        few, runs = microbatches_of(plan), plan.accumulate
        if extent == "brief" and plan.schedule == "1f1b" and not speeds:
            runs = min(runs, LEAST + plan.pipeline + AROUND)
        if few is not None and self._reads_alike(plan):
            for stages in dict.fromkeys((self._few_stages(plan, speeds), None)):
                with contextlib.suppress(MeshwiseError, NotExtrapolable):  # if this fails, trace more stages
                    return self._of_few(plan, kind, speeds, few, stages, runs, extent)
        return self._replayed(_Asked(self.job, plan, kind, speeds))[0]

    def _of_few(
        self,
        plan: Plan,
        kind: str,
        speeds: Sequence[Hashable],
        few: int,
        stages: Stages | None,
        runs: int,
        extent: Extent,
    ) -> list[Trace]:
        """Trace a plan with `few` microbatches and, if `stages` is given, few pipeline stages."""
        if stages is None and fills_once(plan):
            raise NotExtrapolable("with few microbatches, the last forward would follow a backward")
        traced, composes = plan if stages is None else stages.few, plan.pipeline > 1
        rows = self.batch_size // plan.accumulate // plan.data * traced.data
        sort = None if stages is None else (kind, stages.sort, stages.blocks > 1)
        third = None if stages is None else sort not in self._alike

        def asked(count: int) -> _Asked:
            job, own = replace(self.job, batch_size=rows * count), with_few(traced, accumulate=count)
            return _Asked(job, own, kind, speeds, composes, third)

        short, long = asked(few), asked(few + 1)
        blocks = None if stages is None else stages.blocks * FEW_STAGES
        found, least, groups = self._replayed(short, blocks)
        if any(each.reads_values for each in found):
            raise NotExtrapolable("what runs may depend on the values of a batch")
        if not composes:
            pairs = zip(found, self._replayed(long, blocks)[0], strict=True)
            return [lengthened(*two, plan.accumulate - few, MICROBATCHES) for two in pairs]
        actions = [actions_of(short.plan, stage_of(short.plan, each.step.rank)) for each in found]
        if third and stages is not None and self.stretch is not None and groups is not None:
            check_third(least, Stages(stages.few, groups // FEW_STAGES), few, blocks_axis(self.stretch))
            self._alike.add(sort)
        least = without_third(least, third is not None)
        growth = self._growth(least, actions, lambda: self._traced(long, groups, False))
        make = functools.cache(lambda at: composer(found[at], growth[at]))
        if stages is not None and self.stretch is not None:
            axis, begun = blocks_axis(self.stretch), make
            if (count := stages.begun) is not None:
                others = self._replayed(replace(asked(count), third=False), blocks)[0]
                begun = functools.cache(lambda at: composer(others[at], with_fewer(growth[at], few, few - count)))

            def made(stage: int) -> Composer:
                return (begun if stage < 2 else make)(stages.like(stage))

            return with_all_stages(made, stages, [each.step.rank for each in found], axis, runs, extent)
        alone = extent == "launches"
        return [make(at)(*with_left_out(own, plan.accumulate, runs), launches=alone) for at, own in enumerate(actions)]

    def _growth(
        self, least: Sequence[Trace], actions: Sequence[Actions], longer: Callable[[], Sequence[Trace]]
    ) -> list[Growth]:
        """Find what grows with the number of microbatches, from a step with one more, or else from longer traces."""
        with contextlib.suppress(NotExtrapolable):
            return [growth_of(each, with_more(each), own) for each, own in zip(least, actions, strict=True)]
        return [growth_of(*three) for three in zip(least, longer(), actions, strict=True)]

    @functools.cached_property
    def stretch(self) -> Stretch | None:
        """The longest sequence of equal blocks of the model, or None."""
        with contextlib.suppress(MeshwiseError):  # the trace of the whole model reports the error
            return self.model.stretch
        return None

    def _few_stages(self, plan: Plan, speeds: Sequence[Hashable]) -> Stages | None:
        """Return the stages of a plan if a few traced stages can stand for all, else None."""
        stretch, alike = self.stretch, not (speeds or plan.state_parts > 1 or isinstance(plan.recompute, tuple))
        if stretch is None or plan.pipeline <= FEW_STAGES or not alike:
            return None
        even = stretch.is_whole and stretch.group == 1 and stretch.count % plan.pipeline == 0
        return Stages(plan, stretch.count // plan.pipeline) if even else None

    def _replayed(self, asked: _Asked, blocks: int | None = None) -> tuple[list[Trace], list[Trace], int | None]:
        """Return a plan's traces, the shortest traces that they extend, and the number of block groups in those."""
        stretch, depth = self.stretch, None
        if stretch is not None:
            depth = depth_of(asked.plan, stretch if blocks is None else stretch.beginning(blocks), blocks is not None)
        if stretch is not None and depth is not None:
            with contextlib.suppress(MeshwiseError, NotExtrapolable):  # otherwise the whole model is traced
                least = depth.few * depth.stages
                short, long = self._traced(asked, least), self._traced(asked, least + depth.stages, False)
                axis, buckets = blocks_axis(stretch), "optimizer" in asked.plan.offload
                pairs = zip(without_third(short, asked.third is not None), long, strict=True)
                return [lengthened(*two, depth.own - depth.few, axis, buckets) for two in pairs], short, least
        found = self._traced(asked, blocks)
        return without_third(found, asked.third is not None), found, blocks

    def _traced(self, asked: _Asked, groups: int | None, least: bool = True) -> list[Trace]:
        """Trace a plan of a job whose model has `groups` groups of equal blocks."""
        stretch, size = self.stretch, asked.job.batch_size
        key = size, asked.plan, asked.kind, tuple(asked.speeds), asked.third is None, groups, least
        if asked.marked and key in self._kept:
            return self._kept[key]
        job = asked.job if stretch is None or groups is None else shortened(asked.job, stretch, groups)
        more = asked.marked and least and asked.kind != "cpu"
        third = None if asked.third is None else least and asked.third
        found = trace(job, asked.plan, asked.kind, asked.speeds, asked.marked, more, third)
        if asked.marked:
            self._kept = dict([*self._kept.items(), (key, found)][-KEPT:])
        return found

    def _reads_alike(self, plan: Plan) -> bool:
        """Return whether all microbatches of the first steps have the same shapes and dtypes."""
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
        """Facts about the job's model."""
        heard = ForwardRecorder()
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
            with contextlib.suppress(Exception):  # if this fails, the whole model is traced
                if self.job.stage_cost is None:
                    heard.forward(model, lambda: self.job.loss(model, self._batch()))
                    stretch = stretch_of(model, heard.done)
            sizes = [(p.nbytes, p.requires_grad) for p in model.parameters()]
            trained = sum(size for size, learns in sizes if learns)
            wide = sum(p.numel() for p in model.parameters() if p.dtype == torch.float32)
            norms, size = any(map(normalises, model.modules())), sum(size for size, _ in sizes)
            return Facts(stretch, norms, size, trained, wide, heard.totals)


def microbatches_of(plan: Plan) -> int | None:
    """Return how many microbatches to trace, or None to trace all of them."""
    few = FEW_MICROBATCHES if plan.pipeline == 1 else LEAST
    alike = not plan.shares and (plan.pipeline == 1 or plan.schedule not in CHUNKS)
    if plan.pipeline > 1 and plan.shard > 1 and plan.schedule != "gpipe":
        few += min(plan.pipeline, FEW_STAGES) - 1
        # If a plan fills its pipeline only once, extrapolate only if not all stages are traced (see `Stages.begun`).
        alike = alike and (not fills_once(plan) or plan.accumulate >= plan.pipeline > FEW_STAGES)
    return few if alike and plan.accumulate * plan.pipeline > _few_parts(plan, few) else None


def parts_traced(plan: Plan) -> int:
    """Estimate how much work it is to trace a step under the plan: how many microbatches are traced, counted once for
    each pipeline stage that is traced. With tensor parallelism, the number is doubled."""
    few = microbatches_of(plan)
    return (plan.accumulate * plan.pipeline if few is None else _few_parts(plan, few)) * (2 if plan.tensor > 1 else 1)


def _few_parts(plan: Plan, few: int) -> int:
    """Like `parts_traced`, for `few` and `few + 1` microbatches (in a pipeline, `few + 1` with the fewest blocks)."""
    return 2 * few + 1 if plan.pipeline == 1 else (3 * few + 1) * min(plan.pipeline, FEW_STAGES) // 2
