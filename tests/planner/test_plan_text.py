"""What a person reads of the plans, and what a program does.

Of planner/views/plan_text.py too.
"""

import json
from dataclasses import replace

from meshwise.planner.closed_form import Guess
from meshwise.planner.plan import Plans
from meshwise.planner.search import Refused, Search
from meshwise.planner.views.plan_text import plans_dict, plans_text, worth_showing
from meshwise.spec.machine import Machine
from meshwise.spec.plan import Plan
from tests.planner.test_search import estimate


def plans(*estimates, refused=(), **more):
    found = Search(tuple(estimates), tuple(refused), (Plan(data=8),), 3.0)
    machine = Machine("2xH100", (), warnings=("the network is unknown",))
    return Plans("gpt", 8, machine, found, **more)


def test_the_table_ranks_and_says_why():
    text = str(plans_text(plans(estimate(Plan(), 0.1, 50), estimate(Plan(data=2), 0.2, 50),
                                refused=[Refused(Plan(tensor=2), "three heads")])))  # fmt: skip
    assert "1 device: a step takes 100 ms; with data=2 it takes 200 ms." in text
    assert "tensor=2: refused: three heads" in text
    assert "data=8: not rehearsed, because the time was over (--seconds allows more)" in text
    assert "note: the network is unknown" in text


def test_what_does_not_fit_says_by_how_much_and_what_would_change_it():
    text = str(plans_text(plans(estimate(Plan(data=2), 0.1, 200), estimate(Plan(data=2, recompute="full"), 0.15, 150))))
    assert "data=2 does not fit: 180 B to 220 B of 100 B." in text
    assert "No plan fits. The nearest plan, data=2 recompute=full, may need 65 B too much: ." in text
    assert "recompute=full: -50 B, +50 % time; does not fit" in text


def test_the_one_that_was_asked_about_is_judged_alone():
    text = str(plans_text(plans(estimate(Plan(data=2), 0.1, 96), one=True)))
    assert "data=2 is too close to call: 86 B to 106 B of 100 B." in text


def test_what_another_plan_of_the_same_axes_beats_is_not_shown():
    one, slower, smaller = (
        estimate(Plan(), 1, 50),
        estimate(Plan(accumulate=2), 2, 50),
        estimate(Plan(accumulate=4), 3, 9),
    )
    assert worth_showing([one, slower, smaller]) == [one, smaller]
    text = str(plans_text(plans(one, slower, smaller)))
    assert "\n2  data=1" not in text and "\n3  data=1 accumulate=4" in text
    assert "\ndata=1 accumulate=2: behind a row on the same axes" in text


def test_each_plan_that_was_guessed_at_first_has_a_row_or_a_line():
    """Plans behind a row, and those that are likely slower, went without a word."""
    guess, row = Guess(1.0, 50.0), estimate(Plan(shard=2), 1, 50)
    behind, large = estimate(Plan(shard=2, recompute="full"), 2, 50), estimate(Plan(data=2), 3, 500)
    slower = [Plan(tensor=2), *(Plan(tensor=2, recompute=how) for how in ("full", "selective"))]
    slower += [Plan(tensor=2, sequence=True, recompute=how) for how in ("none", "full", "selective")]
    first = tuple((plan, guess) for plan in (behind.plan, large.plan, slower[-1], Plan(data=8)))
    found = Search((row, behind, large), (), (Plan(data=8),), 3.0, tuple(slower), first)
    text = str(plans_text(replace(plans(row), found=found)))
    assert "shard=2 recompute=full: behind a row on the same axes" in text
    assert "data=2: does not fit" in text and "data=8: not rehearsed, because the time was over" in text
    assert "tensor=2 sequence=true recompute=selective, tensor=2, " in text
    assert " and 1 more: not rehearsed, because it is likely slower" in text


def test_the_dtype_that_is_computed_in_is_named():
    assert "gpt on 2xH100, batch 8, computed in bf16" in str(
        plans_text(plans(replace(estimate(Plan(), 1, 50), dtype="bf16")))
    )


def test_a_narrow_screen_has_fewer_columns_and_every_plan_on_a_line():
    several = plans(estimate(Plan(), 0.1, 50), estimate(Plan(data=2, recompute="full"), 0.2, 50))
    wide, narrow = (str(plans_text(several, width)).splitlines()[2:5] for width in (None, 60))
    assert "80 % of cases" in wide[0] and "80 % of cases" not in narrow[0]
    assert max(map(len, narrow)) <= 60 and narrow[2].startswith("2  data=2 recompute=full")


def test_the_training_has_hours():
    text = str(plans_text(plans(estimate(Plan(data=2), 0.1, 50), steps=10_000)))
    assert "Training of 10,000 steps: 16 min 40 s, 0.56 device hours." in text


def test_a_notebook_and_print_show_the_table():
    told = plans(estimate(Plan(data=2), 0.1, 50))
    assert "1  data=2" in str(told) and "data=2" in told._repr_html_()
    assert "Rehearsed" not in repr(told)


def test_every_figure_is_in_the_json():
    told = json.loads(json.dumps(plans_dict(plans(estimate(Plan(data=2), 0.1, 95)))))
    assert told["plans"][0]["memory"]["verdict"] == "too close to call"
    assert told["plans"][0]["plan"] == {"data": 2}
    assert told["not_rehearsed"] == [{"data": 8}]
    assert told["training"] == {"steps": None} and told["plans"][0]["device_hours"] is None
