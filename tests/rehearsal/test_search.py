"""The search: the fastest plan that fits is first; refusals have a reason; what saves memory is tried and priced.

Of rehearsal/edits.py too.
"""

from dataclasses import replace

import pytest

from meshwise.rehearsal.edits import edits
from meshwise.rehearsal.estimate import Estimate, Memory, Range
from meshwise.rehearsal.search import confirmed, search
from meshwise.spec.errors import PlanError
from meshwise.spec.plan import Plan


def estimate(plan, seconds, memory, capacity=100):
    return Estimate(plan, Memory(0, Range(memory, memory * 0.9, memory * 1.1), memory, {}, memory, 0, capacity),
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


def test_the_first_of_rough_plans_is_confirmed_and_so_is_a_faster_one_that_may_fit():
    rough = {Plan(): (3.0, 50), Plan(data=2): (2.0, 95), Plan(shard=2): (1.0, 105), Plan(tensor=2): (0.5, 300)}
    whole = {Plan(): (3.1, 50), Plan(data=2): (2.1, 80), Plan(shard=2): (1.1, 120)}
    asked = []

    def confirm(plan):
        asked.append(plan)
        return estimate(plan, *whole[plan])

    def roughly(plan):
        return replace(estimate(plan, *rough[plan]), rough=True)

    found = confirmed(search(list(rough), roughly, 60), confirm, 60, lambda found: None)
    assert asked == [Plan(), Plan(shard=2), Plan(data=2)]  # the first, and those that are faster and may fit
    assert [each.plan for each in found.estimates][:2] == [Plan(data=2), Plan()]
    assert [each.plan for each in found.estimates if each.rough] == [Plan(tensor=2)]


def test_a_rough_plan_that_the_whole_model_refuses_is_refused():
    def confirm(plan):
        if plan == Plan(data=2):
            raise PlanError("no")
        return estimate(plan, 2.0, 50)

    rough = search([Plan(), Plan(data=2)], lambda plan: replace(estimate(plan, 3 - plan.data, 50), rough=True), 60)
    found = confirmed(rough, confirm, 60, lambda found: None)
    assert [each.plan for each in found.estimates] == [Plan()]
    assert [each.why for each in found.refused] == ["no"]


def test_without_time_the_first_is_confirmed_all_the_same():
    rough = search([Plan(), Plan(data=2)], lambda plan: replace(estimate(plan, 1, 50), rough=True), 0.0)
    shown = []
    found = confirmed(rough, lambda plan: estimate(plan, 1, 60), 0.0, shown.append)
    assert [(each.plan, each.rough) for each in found.estimates] == [(Plan(), False)]
    assert shown == [found]


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
