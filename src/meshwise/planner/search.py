"""Search for plans: rehearse the likely best first, while time lasts.

To rehearse a plan is to trace its step on fake tensors and to simulate the time of the step.

A plan that cannot run is refused, with the reason that `parallel` gives. Plans that split the model in the same way are
then refused too. A plan is not rehearsed if a bound shows that it cannot fit in memory or cannot be the fastest.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from meshwise.parallel.schedule import CHUNKS
from meshwise.planner.closed_form import Guess
from meshwise.planner.estimate import FITS, TOO_CLOSE, TOO_LARGE, Estimate
from meshwise.planner.estimator import Rehearsed
from meshwise.planner.places import OutOfTime, until
from meshwise.planner.tracer import Facts, parts_traced
from meshwise.spec.errors import PlanError, UsageError
from meshwise.spec.machine import Machine
from meshwise.spec.plan import Plan
from meshwise.spec.units import bytes_text

COMPUTED_IN = ("fp64", "fp32", "tf32", "bf16", "fp16")


class Bounds:
    """Lower bounds on the memory and the step time of any plan of one job on one machine."""

    def __init__(self, model: Facts, machine: Machine, cap: int | None) -> None:
        """cap: the maximum number of bytes of each device's memory that a step may use. None: all of the memory."""
        self._model = model
        sizes = [device.memory for device in machine.devices]
        self.room = None if None in sizes else max(size for size in sizes if size is not None)
        self.room = cap if self.room is None or (cap is not None and cap < self.room) else self.room
        peaks = [max((device.peak.get(word, 0.0) for word in COMPUTED_IN), default=0.0) for device in machine.devices]
        self._peaks = peaks if all(peaks) else []
        self._state = 0.0
        self._flops = 0.0

    def learn(self, found: Rehearsed) -> None:
        """Learn the size of the optimizer's state and the FLOPs of a step from a simulated plan."""
        plan, work = found.estimate.plan, found.traces[0].step
        simple = plan.devices == plan.data * plan.shard and not plan.shares
        if self._flops or plan.state_parts > 1 or plan.offload or not simple:
            return
        self._state = work.holds("optimizer") / max(work.holds("parameters"), 1)
        once = 1.0 if plan.recompute == "none" else 3 / 4  # recomputing the forward is at most a fourth of the work
        self._flops = work.flops * plan.devices * once

    def too_large(self, plan: Plan) -> str:
        """Return why the plan cannot fit in memory even without activations, or an empty string if it may fit."""
        if self.room is None or plan.offload or plan.param_dtype is not None:
            return ""
        ways = plan.shard * plan.tensor * plan.pipeline * plan.expert
        model = self._model
        state = model.parameters * self._state / plan.state_parts
        if (model.parameters + model.trained + state) / ways <= self.room:
            return ""
        return f"parameters, gradients and the optimizer's state alone take more than {bytes_text(self.room)}"

    def seconds(self, plan: Plan) -> float:
        """Return a lower bound on the seconds of a step under the plan. Return 0 if nothing is known yet."""
        if not self._peaks:
            return 0.0
        bubble = 1 + (plan.pipeline - 1) / (plan.accumulate * CHUNKS.get(plan.schedule, 1))
        return self._flops * bubble / sum(self._peaks[: plan.devices])


Rehearse = Callable[[Plan], Estimate]
SLOWER = "slower than the first even at the peak rate of its devices"
UNLIKELY = 1.25
"""A plan is not simulated if its step is expected to take more than this many times as long as the best one."""
MOST_TRACED = 7
SOON = 2 * MOST_TRACED
"""Until a plan has been simulated, plans with more to trace than this (see `parts_traced`) are tried last."""
SIMPLER = 0.04
"""A plan with twice the microbatches, stages or layer parts is tried later, unless it is faster by this fraction."""
FIRST = 5
"""The number of likely best plans that are shown before any plan is simulated."""
NEAREST = 3
"""If no plan fits, changes that save memory are tried on the NEAREST plans that need the least memory."""


@dataclass(frozen=True)
class Refused:
    """A plan that was not estimated, with the reason: it cannot run, cannot fit in memory, or cannot be the fastest."""

    plan: Plan
    why: str


@dataclass(frozen=True)
class Search:
    """The result of a search."""

    estimates: tuple[Estimate, ...]
    refused: tuple[Refused, ...]
    left: tuple[Plan, ...]
    seconds: float
    worse: tuple[Plan, ...] = ()
    first: tuple[tuple[Plan, Guess], ...] = ()


@dataclass(frozen=True)
class Known:
    """What is known about plans before they are simulated."""

    bounds: Bounds | None = None
    guess: Callable[[Plan], Guess] | None = None
    room: float = float("inf")


NOTHING = Known()


def search(
    plans: Sequence[Plan],
    rehearse: Rehearse,
    seconds: float,
    *,
    savers: Callable[[Plan], Sequence[Plan]] = lambda plan: (),
    show: Callable[[Search], None] = lambda found: None,
    known: Known = NOTHING,
    roomy: float = 0.0,
    clock: Callable[[], float] = time.process_time,
) -> Search:
    """Simulate plans until the time is over, the likely best plans first."""
    going = _Searching(plans, rehearse, seconds, show, known, clock)
    if known.guess is not None:
        show(going.found())
    while not going.late and (plan := going.next()) is not None:
        estimate = going.tried(plan)
        if estimate is not None and estimate.balanced and not plan.shares and not going.late:
            going.tried(replace(plan, shares=estimate.balanced))
    if not going.estimates and going.too_large:  # show how much too large the nearest plan is, and what would help
        going.tried(going.nearest[0], bounded=False)
    found = going.found().estimates
    if not any(each.memory.verdict not in (TOO_LARGE, TOO_CLOSE) for each in found):
        for plan in going.nearest[:NEAREST]:
            if not going.late:
                going.saved(savers(plan), until=True)
    best = next(iter(going.found().estimates), None)
    if (
        best is not None
        and best.seconds is not None
        and (not roomy or best.memory.total.high >= roomy * (best.memory.capacity or math.inf))
    ):
        going.saved(savers(best.plan), until=False)
    return going.found()


class _Searching:
    def __init__(
        self,
        plans: Sequence[Plan],
        rehearse: Rehearse,
        seconds: float,
        show: Callable[[Search], None],
        known: Known,
        clock: Callable[[], float],
    ) -> None:
        self._rehearse, self._show, self._clock = rehearse, show, clock
        self._bounds, self._guess, self._room = known.bounds, known.guess, known.room
        self._begun, self._seconds = clock(), seconds
        self._open = dict.fromkeys(plans)
        self._over = False
        self._rate = 0.0  # the most seconds that a rehearsal has taken per traced part
        self._first: tuple[tuple[Plan, Guess], ...] = ()
        self.estimates: dict[Plan, Estimate] = {}
        self._refused: dict[Plan, str] = {}
        self._cannot: set[Plan] = set()  # plans that `parallel` refused
        self.too_large: list[Plan] = []  # plans that the memory bound refused

    @property
    def late(self) -> bool:
        return self._over or (bool(self.estimates) and self._clock() - self._begun > self._seconds)

    def next(self) -> Plan | None:
        """Return the likely best plan to simulate next, or None if none is worth its time."""
        for plan in [plan for plan in self._open if self._out_of_bounds(plan)]:
            del self._open[plan]
        left = self._seconds - (self._clock() - self._begun)
        able = [plan for plan in self._open if not self._rate or self._rate * parts_traced(plan) < left]
        if not able or self._guess is None:
            return next(iter(able), None)
        plan = min(able, key=self._likely)
        return None if self._is_worse(plan) else plan

    def _is_worse(self, plan: Plan) -> bool:
        """Return whether a plan likely does not fit, or is likely slower than a simulated plan that fits."""
        best = min((each.seconds.value for each in self._fitting() if each.seconds is not None), default=None)
        if best is None or self._guess is None:
            return False
        return self._likely(plan)[0] or self._guess(plan).seconds > UNLIKELY * best

    def _likely(self, plan: Plan) -> tuple[bool, int, float, float]:
        """Return a sort key that puts the likely best plans first."""
        assert self._guess is not None
        guess = self._guess(plan)
        over = guess.memory > self._room
        parts = plan.tensor * plan.pipeline
        simple = guess.seconds * (1 + SIMPLER * math.log2(parts * plan.accumulate))
        later = 0 if self.estimates else (parts > 1) + (parts_traced(plan) > SOON)
        return over, later, guess.memory if over else simple, guess.memory

    def _fitting(self) -> list[Estimate]:
        return [each for each in self.estimates.values() if each.memory.verdict not in (TOO_LARGE, TOO_CLOSE)]

    @property
    def nearest(self) -> list[Plan]:
        """The plans that come nearest to fitting: the simulated ones first, by their memory."""
        tried = sorted(self.estimates.values(), key=lambda each: each.memory.total.value)
        large = self.too_large if self._guess is None else sorted(self.too_large, key=lambda p: self._likely(p)[-1])
        return list(dict.fromkeys([*(each.plan for each in tried), *large]))

    def found(self) -> Search:
        ranked = sorted(self.estimates.values(), key=lambda estimate: estimate.rank_key)
        no = tuple(Refused(plan, why) for plan, why in self._refused.items())
        left = [plan for plan in self._open if not self._is_worse(plan)]
        worse = tuple(plan for plan in self._open if plan not in left)
        if self._guess is not None:
            left.sort(key=self._likely)
            self._first = self._first or tuple((plan, self._guess(plan)) for plan in left[:FIRST])
        return Search(tuple(ranked), no, tuple(left), self._clock() - self._begun, worse, self._first)

    def tried(self, plan: Plan, bounded: bool = True) -> Estimate | None:
        """Simulate a plan and return its estimate, or None. bounded: whether bounds may reject it."""
        if plan in self.estimates or (plan in self._refused and bounded):
            return self.estimates.get(plan)
        alike = (why for other, why in self._refused.items() if other in self._cannot and _same_split(plan, other))
        try:
            if why := next(alike, ""):
                raise PlanError(why)
            if bounded and self._out_of_bounds(plan):
                return None
            limit = until(self._begun + self._seconds, self._clock) if self.estimates else contextlib.nullcontext()
            began = self._clock()
            with limit:
                self.estimates[plan] = self._rehearse(plan)
            self._rate = max(self._rate, (self._clock() - began) / parts_traced(plan))
            self._refused.pop(plan, None)
        except OutOfTime:
            self._over = True
            return None
        except PlanError as error:
            self._refused[plan] = str(error)
            self._cannot.add(plan)
        except UsageError as error:  # if no plan has worked yet, the program itself fails: report it at once
            if not self.estimates:
                raise
            self._refused[plan] = str(error)
        self._open.pop(plan, None)
        self._show(self.found())
        return self.estimates.get(plan)

    def _out_of_bounds(self, plan: Plan) -> bool:
        """Return whether a plan cannot fit in memory, or cannot be faster than the fastest simulated plan that fits."""
        if self._bounds is None:
            return False
        why = self._bounds.too_large(plan)
        if why:
            self.too_large.append(plan)
        else:
            fitting = [each.seconds.value for each in self._fitting() if each.seconds]
            why = SLOWER if fitting and self._bounds.seconds(plan) > min(fitting) else ""
        if why:
            self._refused[plan] = why
        return bool(why)

    def saved(self, cheaper: Sequence[Plan], until: bool) -> None:
        """Simulate these plans in order. until: whether to stop at the first that fits."""
        for plan in cheaper:
            if self.late or ((other := self.tried(plan)) is not None and until and other.memory.verdict == FITS):
                return


def _same_split(plan: Plan, refused: Plan) -> bool:
    """Return whether `plan` would be refused for the same reason as the plan `refused`."""
    axes = ("pipeline", "tensor", "context", "expert")
    cut = tuple(getattr(plan, axis) for axis in axes)
    also = ((getattr(plan, name), getattr(refused, name), default) for name, default in ALSO.items())
    return (
        max(cut) > 1
        and cut == tuple(getattr(refused, axis) for axis in axes)
        and all(had in (own, default) for own, had, default in also)
    )


ALSO = {"sequence": False, "recompute": "none"}
"""Options that can be the reason why a plan is refused, with their defaults. The default is never the reason."""
