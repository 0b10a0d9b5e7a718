"""Build traces of deep models from traces of few blocks.

Where blocks are alike, the built trace equals that of the whole.

Two models that differ by one block on each stage are traced, and the rest is replayed. Where that cannot be exact, all
blocks are traced.

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
from meshwise.rehearsal.growth import Unlike
from meshwise.rehearsal.replay import MICROBATCHES, GrowthAxis, lengthened
from meshwise.rehearsal.shorter import Forward, Heard, Stretch, shortened, stretch_of
from meshwise.rehearsal.trace import STEPS, Trace, trace
from meshwise.rehearsal.work import Launch
from meshwise.spec.errors import MeshwiseError, UsageError
from meshwise.spec.plan import Plan
from meshwise.spec.world import World

FEW = 3
"""Groups of blocks per stage in the shorter model: the first and the last differ from those between. Plans on several
devices need one more: a shard holds memory of up to three blocks at once, the running one, the next one's parameters
and the previous one's gradients."""
FEW_MICROBATCHES = 3
"""Microbatches of the shorter step: the first and the last differ from those between. Each further pipeline stage
needs one more, or two under 1F1B."""


@dataclass(frozen=True)
class Depth:
    """How many groups of blocks a stage has: own in the real model, few in the shorter one. stages: their number."""

    own: int
    few: int
    stages: int


@dataclass(frozen=True)
class Facts:
    """What is known of a model. stretch: its equal blocks. batch_norms: whether it has some. parameters, trained: bytes
    of all parameters and of trained ones. wide: number of float32 parameters. forward: its size for a global batch."""

    stretch: Stretch | None
    batch_norms: bool
    parameters: int
    trained: int
    wide: int = 0
    forward: Forward = field(default_factory=Forward)
    stepped: float = 0.0


class Tracer:
    """Traces plans of a job, as `trace` does, but from few blocks and microbatches if the result is the same."""

    def __init__(self, job: Job) -> None:
        """The data is opened once for all plans, and read without worker processes."""
        self.job = replace(job, data=functools.cache(job.data), loader_workers=0)
        self.batch_size = job.batch_size

    def __call__(self, plan: Plan, kind: str, speeds: Sequence[Hashable] = ()) -> list[Trace]:
        """Trace a plan, and return one trace for each kind of rank. Raises the same errors as `trace`."""
        few = microbatches_of(plan)
        if few is not None and self._reads_alike(plan):
            part = self.batch_size // plan.accumulate
            with contextlib.suppress(MeshwiseError, Unlike):
                short, long = (
                    self._replayed(
                        replace(self.job, batch_size=part * count), replace(plan, accumulate=count), kind, speeds
                    )
                    for count in (few, few + 1)
                )
                if not any(each.reads_values for each in short):  # others may have other values
                    times = plan.accumulate - few
                    return [lengthened(*two, times, MICROBATCHES) for two in zip(short, long, strict=True)]
        return self._replayed(self.job, plan, kind, speeds)

    def _replayed(self, job: Job, plan: Plan, kind: str, speeds: Sequence[Hashable]) -> list[Trace]:
        """Trace a plan; trace few blocks and extend the traces to all of them if the result is the same."""
        stretch = None
        with contextlib.suppress(MeshwiseError):  # as the trace of the whole model will say
            stretch = self.model.stretch
        depth = None if stretch is None else depth_of(plan, stretch)
        if stretch is not None and depth is not None:
            with contextlib.suppress(MeshwiseError, Unlike):  # what the whole model says is what counts
                short, long = (
                    trace(shortened(job, stretch, count * depth.stages), plan, kind, speeds)
                    for count in (depth.few, depth.few + 1)
                )
                axis = blocks_axis(stretch)
                times, buckets = depth.own - depth.few, "optimizer" in plan.offload
                return [lengthened(*two, times, axis, buckets) for two in zip(short, long, strict=True)]
        return trace(job, plan, kind, speeds)

    def _reads_alike(self, plan: Plan) -> bool:
        """Return whether all microbatches of rank 0 in its first steps have tensors of the same shapes."""
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
        """The facts on the job's model, from building it and one forward. Raises UsageError if it cannot be built."""
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
                    f"values: {why}. Compute this value without torch (numpy, math)."
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
    """Return how many microbatches to trace; None to trace all: if few save nothing, or if a rank's stages alternate
    (interleaved), or if ranks have unequal shares."""
    few = FEW_MICROBATCHES + (plan.pipeline - 1) * (1 if plan.schedule == "gpipe" else 2)
    alike = not plan.shares and (plan.pipeline == 1 or plan.schedule not in CHUNKS)
    return few if alike and plan.accumulate > 2 * few + 1 else None


def depth_of(plan: Plan, stretch: Stretch) -> Depth | None:
    """Return how many blocks to trace; None to trace all: if few save nothing, or would change a stage's content."""
    stages = plan.pipeline * CHUNKS.get(plan.schedule, 1) if plan.pipeline > 1 else 1
    if (
        isinstance(plan.recompute, tuple)
        or plan.zero1
        or (stages > 1 and not (stretch.is_whole and stretch.group == 1 and stretch.count % stages == 0))
    ):
        return None
    own, few = stretch.count // stages, FEW + (plan.devices > 1)
    return Depth(own, few, stages) if own > 2 * few + 1 else None


def blocks_axis(stretch: Stretch) -> GrowthAxis:
    """Return the axis along which a trace grows with more blocks: it numbers the groups of the stretch. A rank also
    calls the blocks of earlier stages, which only pass on a shape; these are in the same stretch."""
    places = {name: place - stretch.start for place, name in enumerate(stretch.names)}

    @functools.cache
    def known(module: str) -> tuple[int, str]:
        """Return the index of a module's block in the stretch (-1: outside), and its name within the block."""
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
