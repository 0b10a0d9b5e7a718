"""Search: rehearse one plan after the other, the likely best first, for as long as there is time.

A plan that cannot run is refused with the reason of `parallel`, and so are the plans that would be refused for the same
reason. A plan whose parts alone overfill a device is left out without a rehearsal.

Tested in tests/rehearsal/test_search.py.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from meshwise.rehearsal.estimate import Estimate
from meshwise.spec.errors import MeshwiseError
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
    plans: Sequence[Plan], rehearse: Rehearse, seconds: float, show: Callable[[Search], None] = lambda found: None
) -> Search:
    """Rehearse `plans` in their order until `seconds` are over; at least one is. show: called after each with what is
    known so far."""
    begun = time.monotonic()
    estimates: list[Estimate] = []
    refused: list[Refused] = []

    def found(left: Iterable[Plan] = ()) -> Search:
        ranked = sorted(estimates, key=lambda estimate: estimate.rank_key)
        return Search(tuple(ranked), tuple(refused), tuple(left), time.monotonic() - begun)

    for number, plan in enumerate(plans):
        if number and time.monotonic() - begun > seconds and estimates:
            return found(plans[number:])
        why = next((other.why for other in refused if _refused_alike(plan, other.plan)), "")
        if why:
            refused.append(Refused(plan, why))
            continue
        try:
            estimates.append(rehearse(plan))
        except MeshwiseError as error:
            refused.append(Refused(plan, str(error)))
        show(found(plans[number + 1 :]))
    return found()


def _refused_alike(plan: Plan, refused: Plan) -> bool:
    """Whether a plan cuts the model as one that was refused does: the reason is the same."""
    axes = ("pipeline", "tensor", "context", "expert")
    cut = tuple(getattr(plan, axis) for axis in axes)
    return max(cut) > 1 and cut == tuple(getattr(refused, axis) for axis in axes)


def fastest_that_fits(found: Search) -> Estimate | None:
    """The plan to run; None where none fits for certain."""
    first = next(iter(found.estimates), None)
    return first if first is not None and first.memory.verdict == "fits" else None


def by_devices(found: Search) -> Iterator[tuple[int, Estimate]]:
    """The best plan of each count of devices."""
    for count in sorted({estimate.plan.devices for estimate in found.estimates}):
        yield count, next(each for each in found.estimates if each.plan.devices == count)
