"""Search: rehearse one plan after the other, the likely best first, for as long as there is time.

A plan that cannot run is refused with the reason of `parallel`, and so are those that cut the model in the same way.

Tested in tests/rehearsal/test_search.py.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from meshwise.rehearsal.estimate import FITS, TOO_CLOSE, TOO_LARGE, Estimate
from meshwise.spec.errors import PlanError, UsageError
from meshwise.spec.plan import Plan

Rehearse = Callable[[Plan], Estimate]


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
) -> Search:
    """Rehearse `plans` in their order until `seconds` are over; at least one is.

    savers: what a plan that does not fit would be with less memory, the cheapest first: rehearsed until one fits.
    What would be saved of the best plan is rehearsed at the end, while there is time. show: called after each with
    what is known so far.
    """
    begun = time.monotonic()
    estimates: dict[Plan, Estimate] = {}
    refused: dict[Plan, str] = {}
    cannot: set[Plan] = set()  # of those, what `parallel` refused

    def late() -> bool:
        return bool(estimates) and time.monotonic() - begun > seconds

    def found() -> Search:
        ranked = sorted(estimates.values(), key=lambda estimate: estimate.rank_key)
        no = tuple(Refused(plan, why) for plan, why in refused.items())
        left = tuple(plan for plan in plans if plan not in estimates and plan not in refused)
        return Search(tuple(ranked), no, left, time.monotonic() - begun)

    def tried(plan: Plan) -> Estimate | None:
        """Its estimate; None for one that is refused."""
        if plan not in estimates and plan not in refused:
            why = next((why for other, why in refused.items() if other in cannot and _cut_alike(plan, other)), "")
            try:
                if why:
                    raise PlanError(why)
                estimates[plan] = rehearse(plan)
            except PlanError as error:
                refused[plan] = str(error)
                cannot.add(plan)
            except UsageError as error:  # of the program, whatever the plan: said at once
                if not estimates:
                    raise
                refused[plan] = str(error)
            show(found())
        return estimates.get(plan)

    def saved(plan: Plan, until: bool) -> None:
        for cheaper in savers(plan):
            if late() or ((other := tried(cheaper)) is not None and until and other.memory.verdict == FITS):
                return

    for plan in itertools.takewhile(lambda plan: not late(), plans):
        if (estimate := tried(plan)) is not None and estimate.balanced and not plan.shares and not late():
            tried(replace(plan, shares=estimate.balanced))
    for estimate in found().estimates:  # now the best first
        if estimate.memory.verdict in (TOO_LARGE, TOO_CLOSE) and not late():
            saved(estimate.plan, until=True)
    if estimates and found().estimates[0].seconds is not None:
        saved(found().estimates[0].plan, until=False)
    return found()


def confirmed(found: Search, whole: Rehearse, seconds: float, show: Callable[[Search], None]) -> Search:
    """The search with its first plan rehearsed whole, where it is rough, and, until `seconds` of it are over, faster
    ones that may fit. show: as in `search`."""
    begun = time.monotonic() - found.seconds
    while (rough := _to_confirm(found.estimates, time.monotonic() - begun > seconds)) is not None:
        estimates, refused = [each for each in found.estimates if each is not rough], found.refused
        try:
            estimates.append(whole(rough.plan))
        except (PlanError, UsageError) as error:
            refused = (*refused, Refused(rough.plan, str(error)))
        ranked = tuple(sorted(estimates, key=lambda estimate: estimate.rank_key))
        found = replace(found, estimates=ranked, refused=refused, seconds=time.monotonic() - begun)
        show(found)
    return found


def _to_confirm(ranked: Sequence[Estimate], late: bool) -> Estimate | None:
    """The estimate that has to be confirmed next, if any. ranked: the best first."""
    if not ranked or ranked[0].rough:
        return ranked[0] if ranked else None
    if late or ranked[0].seconds is None:
        return None
    within = ranked[0].seconds.value
    close = (each for each in ranked if each.rough and each.memory.verdict == TOO_CLOSE)
    return next((each for each in close if each.seconds is not None and each.seconds.value < within), None)


def _cut_alike(plan: Plan, refused: Plan) -> bool:
    """Whether a plan cuts the model as one that was refused does: the reason is the same."""
    axes = ("pipeline", "tensor", "context", "expert")
    cut = tuple(getattr(plan, axis) for axis in axes)
    return max(cut) > 1 and cut == tuple(getattr(refused, axis) for axis in axes)
