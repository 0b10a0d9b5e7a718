"""Estimates in a straight line: what a plan costs at the model's depth, from two rehearsals of few of its blocks.

Each further block that is like the others adds the same time and the same memory. The peak is where it is highest at
the depth in question, which may be another place than in the short ones: so the line is drawn for every place apart (a
phase of a microbatch, in the first block, the last, those between, or outside of them).

Tested in tests/rehearsal/test_straight.py.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from meshwise.compat.fake import FakeTensors
from meshwise.parallel.schedule import CHUNKS
from meshwise.rehearsal.estimate import Estimate, Memory, Range
from meshwise.rehearsal.estimator import memory_of, rehearser, works_of
from meshwise.rehearsal.memory import Bytes, memory_curve
from meshwise.rehearsal.shorter import Stretch, shortened, stretch_of
from meshwise.rehearsal.work import CATEGORIES, Launch, Work
from meshwise.spec.errors import MeshwiseError
from meshwise.spec.machine import Machine
from meshwise.spec.plan import Plan
from meshwise.training.job import Job

FEW = 3
"""Groups of blocks of the shorter one. A shard holds up to three at once: the one that runs, the next one's parameters
and the gradients of the one before."""
RESERVED = 0.1
"""Of what is allocated: what the allocator may hold beside it at another depth than at those that were rehearsed. Large
blocks that do not fit into what others have left make it jump."""
Peaks = Mapping[tuple[Any, ...], Bytes]


@dataclass(frozen=True)
class Point:
    """What one rehearsal says. ranks: of each rank that was traced its memory, and the most of each place."""

    estimate: Estimate
    ranks: Sequence[tuple[Memory, Peaks]]


class Rough:
    """Estimates plans of a job on a machine from some of the blocks, where they are alike; else whole."""

    def __init__(self, job: Job, machine: Machine, cap: int | None, whole: Callable[[Plan], Estimate]) -> None:
        """cap: as in `estimator`. whole: estimates a plan with all blocks."""
        self._job, self._whole = job, whole
        self._rehearse = functools.cache(
            lambda count: rehearser(shortened(self._job, self._stretch, count), machine, cap)  # type: ignore[arg-type]
        )
        self._cap = cap

    def __call__(self, plan: Plan) -> Estimate:
        """Raises as `trace` does."""
        depth = None if self._stretch is None else depths(plan, self._stretch)
        if depth is not None:
            with contextlib.suppress(MeshwiseError):  # what the whole model says is what counts
                return at_depth(functools.partial(self._point, plan), depth)
        return self._whole(plan)

    @functools.cached_property
    def _stretch(self) -> Stretch | None:
        if self._job.stage_cost is not None:
            return None
        with FakeTensors(lambda func, args, kwargs, run: run(), stands_for_real=True):
            try:
                return stretch_of(self._job.model())
            except Exception:  # as the trace of the whole model will say
                return None

    def _point(self, plan: Plan, count: int) -> Point:
        assert self._stretch is not None
        found = self._rehearse(count)(plan)
        names, prices = self._stretch.names, found.prices
        ranks = [(memory_of(each, prices, self._cap), peaks_of(works_of(each, prices), names)) for each in found.traces]
        return Point(found.estimate, ranks)


def depths(plan: Plan, stretch: Stretch) -> tuple[int, int, float] | None:
    """How many groups of blocks to rehearse, in the shorter and the longer one, and how many steps from one to the
    other lead to all; None where nothing is gained, or stages would hold other blocks."""
    stages = plan.pipeline * CHUNKS.get(plan.schedule, 1) if plan.pipeline > 1 else 1
    if stages > 1 and not (stretch.is_whole and stretch.group == 1 and stretch.count % stages == 0):
        return None
    own = stretch.count // stages
    few = FEW if plan.shard > 1 or stages == 1 else FEW - 1
    return (few * stages, (few + 1) * stages, float(own - few)) if own > 2 * few + 1 else None


def at_depth(point_of: Callable[[int], Point], depth: tuple[int, int, float]) -> Estimate:
    """The estimate of all blocks. point_of: rehearses so many groups of them."""
    one, other = point_of(depth[0]), point_of(depth[1])
    memory = max(
        (_memory(first, second, depth[2]) for first, second in zip(one.ranks, other.ranks, strict=True)),
        key=lambda memory: memory.filled,
    )
    first, second = one.estimate, other.estimate
    seconds, parts = None, {}
    if first.seconds is not None and second.seconds is not None:
        seconds = _range(first.seconds, second.seconds, depth[2])
        kinds = first.parts.keys() | second.parts.keys()
        parts = {kind: max(_line(first.parts.get(kind, 0), second.parts.get(kind, 0), depth[2]), 0) for kind in kinds}
    return replace(second, memory=memory, seconds=seconds, parts=parts, notes=(), rough=True)


def peaks_of(works: Sequence[Work], names: Sequence[str]) -> Peaks:
    """The most of each place over these steps, by category. names: of the repeated blocks, in their order."""
    number_of = {name: number for number, name in enumerate(names)}
    found: dict[tuple[Any, ...], Bytes] = {}
    for number, work in enumerate(works):
        curve = memory_curve(work)
        places = _places(work, number_of)
        for place, row in zip(curve.places.tolist(), curve.by_category, strict=True):
            key = (number, *(places[place] if place >= 0 else ("held",)))
            if key not in found or row.sum() > found[key].sum():
                found[key] = row
    return found


def _places(work: Work, number_of: Mapping[str, int]) -> list[tuple[Any, ...]]:
    """Of each event: phase, microbatch and block of the launch that follows it."""
    own = sorted({number_of[launch.module] for launch in work.launches if launch.module in number_of})
    ends = {own[0]: "first", own[-1]: "last"} if own else {}
    found: list[tuple[Any, ...]] = [("end",)] * len(work.events)
    at: tuple[Any, ...] = ("end",)
    for place in range(len(work.events) - 1, -1, -1):
        event = work.events[place]
        if isinstance(event, Launch):
            number = number_of.get(event.module)
            at = event.phase, event.microbatch, event.module if number is None else ends.get(number, "between")
        found[place] = at
    return found


def _memory(one: tuple[Memory, Peaks], other: tuple[Memory, Peaks], steps: float) -> Memory:
    (first, peaks), (second, more) = one, other
    highest = max(
        (_line(peaks[key], more[key], steps) for key in peaks.keys() & more.keys()), key=lambda row: row.sum()
    )
    allocated = int(highest.sum())
    gaps = sorted(memory.reserved - memory.allocated for memory in (first, second))
    unsure = RESERVED * allocated if gaps[1] else 0.0
    reserved = allocated + gaps[1]
    beside = reserved - second.reserved
    return replace(
        second,
        total=Range(
            second.total.value + beside,
            second.total.low + beside - (gaps[1] - gaps[0]),
            second.total.high + beside + unsure,
        ),
        allocated=allocated,
        categories={name: int(size) for name, size in zip(CATEGORIES, np.maximum(highest, 0), strict=True) if size > 0},
        reserved=reserved,
        host=int(_line(first.host, second.host, steps)),
    )


def _range(one: Range, other: Range, steps: float) -> Range:
    return Range(*(_line(getattr(one, end), getattr(other, end), steps) for end in ("value", "low", "high")))


def _line(one: Any, other: Any, steps: float) -> Any:
    """On the line through `one` at 0 and `other` at 1, the value at `steps`."""
    return one + (other - one) * steps
