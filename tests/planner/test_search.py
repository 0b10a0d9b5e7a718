"""The search: the fastest plan that fits is first; refusals have a reason; what saves memory is tried and priced.

Of planner/estimate.py too.
"""

from dataclasses import replace

import pytest

from meshwise.planner.closed_form import Guess
from meshwise.planner.estimate import Estimate, MemoryEstimate, Range, edits
from meshwise.planner.places import OutOfTime
from meshwise.planner.search import SLOWER, Known, search
from meshwise.spec.errors import PlanError
from meshwise.spec.plan import Plan


def estimate(plan, seconds, memory, capacity=100):
    return Estimate(plan, MemoryEstimate(0, Range(memory, memory * 0.9, memory * 1.1), memory, {}, memory, 0, capacity),
                    Range(seconds, seconds, seconds))  # fmt: skip


def test_the_fastest_that_fits_is_first_and_refused_plans_say_why():
    known = {Plan(data=2): (1.0, 200), Plan(shard=2): (2.0, 50), Plan(): (3.0, 50)}

    def rehearse(plan):
        if plan.tensor > 1:
            raise PlanError("three heads")
        return estimate(plan, *known[plan])

    found = search([*known, Plan(tensor=2), Plan(data=2, tensor=2)], rehearse, 60)
    assert [each.plan for each in found.estimates] == [Plan(shard=2), Plan(), Plan(data=2)]
    assert [each.why for each in found.refused] == ["three heads", "three heads"]
    assert not found.left


def test_unequal_devices_get_the_shares_that_balance_them():
    def rehearse(plan):
        return replace(estimate(plan, 1 if plan.shares else 2, 10), balanced=(2.5, 1))

    found = search([Plan(data=2)], rehearse, 60)
    assert [each.plan for each in found.estimates] == [Plan(data=2, shares=(2.5, 1)), Plan(data=2)]


def test_a_plan_that_cuts_the_model_as_a_refused_one_is_not_rehearsed():
    asked = []

    def rehearse(plan):
        asked.append(plan)
        raise PlanError("no")

    search([Plan(tensor=2), Plan(data=2, tensor=2), Plan(tensor=4)], rehearse, 60)
    assert asked == [Plan(tensor=2), Plan(tensor=4)]


def test_memory_is_saved_until_a_plan_fits_and_the_rest_is_left():
    def rehearse(plan):
        return estimate(plan, 1.0 if plan.recompute == "none" else 1.3, 200 if plan.accumulate < 4 else 60)

    cheaper = [Plan(recompute="full"), Plan(accumulate=4), Plan(accumulate=8)]
    found = search([Plan()], rehearse, 60, savers=lambda plan: cheaper)
    assert found.estimates[0].plan == Plan(accumulate=4)
    assert found.estimates[0].memory.verdict == "fits"


def test_without_time_one_plan_is_rehearsed_all_the_same():
    found = search([Plan(), Plan(data=2)], lambda plan: estimate(plan, 1.0, 50), 0.0)
    assert [each.plan for each in found.estimates] == [Plan()]
    assert found.left == (Plan(data=2),)


@pytest.mark.parametrize(
    ("memory", "verdict"), [(50, "fits"), (95, "too close to call"), (120, "does not fit"), (90, "fits")]
)
def test_a_plan_fits_where_the_upper_end_does(memory, verdict):
    assert estimate(Plan(), 1.0, memory).memory.verdict == verdict


def test_what_no_capacity_is_known_of_is_unknown():
    assert estimate(Plan(), 1.0, 10, capacity=None).memory.verdict == "unknown"


def test_edits_are_priced_against_the_plan():
    first = estimate(Plan(data=2), 1.0, 80)
    others = [
        estimate(Plan(data=2, recompute="full"), 1.25, 60),
        estimate(Plan(shard=2), 2.0, 10),
        estimate(Plan(data=2, accumulate=4), 3.0, 30),  # dearer, and saves less
        estimate(Plan(), 1, 1),
    ]
    found = edits(first, others)
    assert [(edit.changes, edit.memory, edit.seconds) for edit in found] == [
        ({"recompute": "full"}, -20, 0.25),
        ({"data": 1, "shard": 2}, -70, 1.0),
    ]


def test_a_plan_whose_rehearsal_is_over_its_time_is_left():
    def rehearse(plan):
        if plan.data == 2:
            raise OutOfTime
        return estimate(plan, 1.0, 50)

    found = search([Plan(), Plan(data=2)], rehearse, 60)
    assert found.left == (Plan(data=2),)
    assert not found.refused


class Given:
    """Bounds by hand: memory by plan, and seconds."""

    def __init__(self, large=(), seconds=None):
        self._large, self._seconds = large, seconds or {}

    def too_large(self, plan):
        return "too large" if plan in self._large else ""

    def seconds(self, plan):
        return self._seconds.get(plan, 0.0)


def test_what_cannot_fit_is_not_rehearsed_but_what_saves_its_memory_is():
    asked = []

    def rehearse(plan):
        asked.append(plan)
        return estimate(plan, 1.0, 50 if plan.zero1 else 500)

    bounds = Given(large=[Plan(data=2)])
    saves = {Plan(data=2): [Plan(data=2, zero1=True)]}
    found = search(
        [Plan(data=2), Plan(shard=2)], rehearse, 60, savers=lambda plan: saves.get(plan, []), known=Known(bounds)
    )
    assert asked == [Plan(shard=2), Plan(data=2, zero1=True)]
    assert [(each.plan, each.why) for each in found.refused] == [(Plan(data=2), "too large")]


def test_where_no_plan_can_fit_one_is_rehearsed_all_the_same():
    plans = [Plan(data=2), Plan(data=4)]
    found = search(plans, lambda plan: estimate(plan, 1.0, 500), 60, known=Known(Given(large=plans)))
    assert [each.plan for each in found.estimates] == [Plan(data=2)]
    assert [each.plan for each in found.refused] == [Plan(data=4)]


def test_what_cannot_be_the_fastest_is_not_rehearsed():
    bounds = Given(seconds={Plan(data=2): 0.5, Plan(): 1.5})
    found = search([Plan(data=2), Plan()], lambda plan: estimate(plan, 1.0, 50), 60, known=Known(bounds))
    assert [each.plan for each in found.estimates] == [Plan(data=2)]
    assert [each.why for each in found.refused] == [SLOWER]


def test_the_likely_fastest_that_has_room_is_first_and_what_is_likely_slower_is_left():
    known = {Plan(): (8.0, 40), Plan(data=2): (4.0, 300), Plan(shard=2): (4.5, 90), Plan(tensor=2): (5.0, 40)}
    asked = []

    def rehearse(plan):
        asked.append(plan)
        return estimate(plan, known[plan][0], known[plan][1] * 0.9)

    found = search(list(known), rehearse, 60, known=Known(None, lambda plan: Guess(*known[plan]), 100))
    assert asked == [Plan(shard=2), Plan(tensor=2)]
    assert (found.worse, found.left) == ((Plan(), Plan(data=2)), ())
    assert [plan for plan, _ in found.first] == [Plan(shard=2), Plan(), Plan(tensor=2), Plan(data=2)]


def test_a_guess_never_says_that_a_plan_fits():
    """All are said to have room; what was not rehearsed whole is left, and what was is judged by that alone."""
    plans = [Plan(shard=power) for power in (2, 4, 8)]
    seen = []
    found = search(
        plans,
        lambda plan: estimate(plan, 1.0, 200),
        0.0,
        known=Known(guess=lambda plan: Guess(1.0 / plan.shard, 1.0), room=100),
        show=seen.append,
    )
    assert [each.plan for each in found.estimates] == [Plan(shard=8)]
    assert found.estimates[0].memory.verdict == "does not fit" and set(found.left) == set(plans[:2])
    assert not seen[0].estimates and [plan for plan, _ in seen[0].first] == [*reversed(plans)]


def test_the_first_one_is_rehearsed_soon_and_the_likely_best_of_these():
    quick, slow = Plan(data=4, tensor=2, accumulate=2), Plan(pipeline=8, accumulate=8)
    guesses = {slow: Guess(1.0, 1.0), quick: Guess(1.1, 1.0)}
    asked = []

    def rehearse(plan):
        asked.append(plan)
        return estimate(plan, guesses[plan].seconds, 10)

    search([*reversed(guesses)], rehearse, 60, known=Known(guess=guesses.get))
    assert asked == [quick, slow]


def test_what_would_not_end_in_time_is_not_begun():
    now = [0.0]

    def rehearse(plan):
        now[0] += 5 * plan.accumulate
        return estimate(plan, 10.0, 50)

    plans = [Plan(), Plan(accumulate=4), Plan(accumulate=2)]
    guess = {plan: Guess(10 - plan.accumulate, 10) for plan in plans}
    found = search(plans, rehearse, 20, known=Known(None, guess.get), clock=lambda: now[0])
    assert len(found.estimates) == 1 and now[0] == 20 and len(found.left) == 2
    now[0] = 0.0
    guess[Plan()] = Guess(1, 10)
    found = search(plans, rehearse, 20, known=Known(None, guess.get), clock=lambda: now[0])
    assert [each.plan for each in found.estimates] == [Plan(), Plan(accumulate=2)] and now[0] == 15


def test_before_any_is_rehearsed_the_likely_best_are_shown():
    shown = []
    plans = [Plan(data=2), Plan(shard=2)]
    guess = {Plan(data=2): Guess(2.0, 10), Plan(shard=2): Guess(1.0, 10)}.__getitem__
    search(plans, lambda plan: estimate(plan, 1.0, 50), 60, known=Known(None, guess), show=shown.append)
    assert shown[0].first == ((Plan(shard=2), Guess(1.0, 10)), (Plan(data=2), Guess(2.0, 10)))
    assert not shown[0].estimates and shown[1].first == shown[0].first  # the table says what became of each


def test_nothing_fits_only_when_the_savers_of_the_nearest_did_not():
    plans = [Plan(data=2), Plan(shard=2), Plan(tensor=2), Plan(pipeline=2, accumulate=2)]
    sizes = dict(zip(plans, (900, 800, 700, 600), strict=True))
    saved = []

    def savers(plan):
        saved.append(plan)
        return [replace(plan, offload=("optimizer",))]

    found = search(plans, lambda plan: estimate(plan, 1.0, sizes.get(plan, 500)), 60, savers=savers)
    assert saved[:3] == [plans[3], plans[2], plans[1]]
    assert found.estimates[0].memory.verdict == "does not fit"


def test_a_refused_way_to_recompute_is_not_taken_for_a_refused_cut():
    def rehearse(plan):
        if plan.recompute == "selective":
            raise PlanError("writes in place")
        return estimate(plan, 1.0, 50)

    plans = [Plan(tensor=2, recompute="selective"), Plan(tensor=2), Plan(data=2, tensor=2, recompute="selective")]
    found = search(plans, rehearse, 60)
    assert [each.plan for each in found.estimates] == [Plan(tensor=2)]
    assert len(found.refused) == 2
