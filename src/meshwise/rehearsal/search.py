"""Search: rehearse one plan after the other, the likely best first, for as long as there is time.

A plan that cannot run is refused with the reason of `parallel`, and so are those that cut the model in the same way.
What cannot fit, or be the fastest, by a bound is not rehearsed.

Tested in tests/rehearsal/test_search.py.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from meshwise.rehearsal.bounds import Bounds
from meshwise.rehearsal.estimate import FITS, TOO_CLOSE, TOO_LARGE, Estimate
from meshwise.rehearsal.places import OutOfTime, until
from meshwise.spec.errors import PlanError, UsageError
from meshwise.spec.plan import Plan

Rehearse = Callable[[Plan], Estimate]
SLOWER = "slower than the first even at the peak rate of its devices"


@dataclass(frozen=True)
class Refused:
    """A plan that cannot run, and why."""

    plan: Plan
    why: str


@dataclass(frozen=True)
class Search:
    """What a search has found. estimates: the best first. left: plans that were not rehearsed, for want of time."""

    estimates: tuple[Estimate, ...]
    refused: tuple[Refused, ...]
    left: tuple[Plan, ...]
    seconds: float


def search(
    plans: Sequence[Plan],
    rehearse: Rehearse,
    seconds: float,
    *,
    savers: Callable[[Plan], Sequence[Plan]] = lambda plan: (),
    show: Callable[[Search], None] = lambda found: None,
    bounds: Bounds | None = None,
    roomy: float = 0.0,
) -> Search:
    """Rehearse `plans` in their order until `seconds` are over; at least one is.

    savers: what a plan that does not fit would be with less memory, the cheapest first: rehearsed until one fits.
    What would be saved of the best plan is rehearsed at the end, while there is time, unless it needs less than
    `roomy` of a device. show: called after each with what is known so far. bounds: plans that cannot fit, or cannot be
    the fastest, are refused by them.
    """
    going = _Searching(plans, rehearse, seconds, show, bounds)
    for plan in itertools.takewhile(lambda plan: not going.late, plans):
        estimate = going.tried(plan)
        if estimate is not None and estimate.balanced and not plan.shares and not going.late:
            going.tried(replace(plan, shares=estimate.balanced))
    if not going.estimates and going.too_large:  # how much too large, and what would help
        going.tried(going.too_large[0], bounded=False)
    over = [each.plan for each in going.found().estimates if each.memory.verdict in (TOO_LARGE, TOO_CLOSE)]
    for plan in dict.fromkeys([*over, *going.too_large]):  # now the best first
        if not going.late:
            going.saved(savers(plan), until=True)
    best = next(iter(going.found().estimates), None)
    if best is not None and best.seconds is not None and _needs(best, roomy):
        going.saved(savers(best.plan), until=False)
    return going.found()


class _Searching:
    """A search under way."""

    def __init__(
        self,
        plans: Sequence[Plan],
        rehearse: Rehearse,
        seconds: float,
        show: Callable[[Search], None],
        bounds: Bounds | None,
    ) -> None:
        self._plans, self._rehearse, self._show, self._bounds = plans, rehearse, show, bounds
        self._begun, self._seconds = time.monotonic(), seconds
        self.estimates: dict[Plan, Estimate] = {}
        self._refused: dict[Plan, str] = {}
        self._cannot: set[Plan] = set()  # of those, what `parallel` refused
        self.too_large: list[Plan] = []  # and what the bound of memory did

    @property
    def late(self) -> bool:
        return bool(self.estimates) and time.monotonic() - self._begun > self._seconds

    def found(self) -> Search:
        """What is known so far."""
        ranked = sorted(self.estimates.values(), key=lambda estimate: estimate.rank_key)
        no = tuple(Refused(plan, why) for plan, why in self._refused.items())
        left = tuple(plan for plan in self._plans if plan not in self.estimates and plan not in self._refused)
        return Search(tuple(ranked), no, left, time.monotonic() - self._begun)

    def tried(self, plan: Plan, bounded: bool = True) -> Estimate | None:
        """Its estimate; None for one that is refused. bounded: also by the bounds."""
        if plan in self.estimates or (plan in self._refused and bounded):
            return self.estimates.get(plan)
        alike = (why for other, why in self._refused.items() if other in self._cannot and _cut_alike(plan, other))
        try:
            if why := next(alike, ""):
                raise PlanError(why)
            if bounded and (why := self._out_of_bounds(plan)):
                self._refused[plan] = why
            else:
                with until(self._begun + self._seconds) if self.estimates else contextlib.nullcontext():
                    self.estimates[plan] = self._rehearse(plan)
                self._refused.pop(plan, None)
        except OutOfTime:
            return None
        except PlanError as error:
            self._refused[plan] = str(error)
            self._cannot.add(plan)
        except UsageError as error:  # of the program, whatever the plan: said at once
            if not self.estimates:
                raise
            self._refused[plan] = str(error)
        self._show(self.found())
        return self.estimates.get(plan)

    def _out_of_bounds(self, plan: Plan) -> str:
        if self._bounds is None:
            return ""
        if why := self._bounds.too_large(plan):
            self.too_large.append(plan)
            return why
        fitting = [
            each.seconds.value for each in self.estimates.values() if each.seconds and each.memory.verdict == FITS
        ]
        return SLOWER if fitting and self._bounds.seconds(plan) > min(fitting) else ""

    def saved(self, cheaper: Sequence[Plan], until: bool) -> None:
        """Rehearse what saves memory. until: until one fits."""
        for plan in cheaper:
            if self.late or ((other := self.tried(plan)) is not None and until and other.memory.verdict == FITS):
                return


def _needs(estimate: Estimate, share: float) -> bool:
    """Whether it needs so much of a device; of one whose size is not known nobody asks."""
    memory = estimate.memory
    return not share or (memory.capacity is not None and memory.total.high >= share * memory.capacity)


def _cut_alike(plan: Plan, refused: Plan) -> bool:
    """Whether a plan cuts the model as one that was refused does: the reason is the same."""
    axes = ("pipeline", "tensor", "context", "expert")
    cut = tuple(getattr(plan, axis) for axis in axes)
    return max(cut) > 1 and cut == tuple(getattr(refused, axis) for axis in axes)
