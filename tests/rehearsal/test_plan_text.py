"""What a person reads of the plans, and what a program does.

Of rehearsal/views/plan_dict.py too.
"""

import json
from types import SimpleNamespace

from meshwise.rehearsal.search import Refused, Search
from meshwise.rehearsal.views.plan_dict import plans_dict
from meshwise.rehearsal.views.plan_text import plan_words, plans_text
from meshwise.spec.plan import Plan
from tests.rehearsal.test_search import estimate


def plans(*estimates, refused=(), one=False):
    found = Search(tuple(estimates), tuple(refused), (Plan(data=8),), 3.0)
    machine = SimpleNamespace(name="2xH100", warnings=("the network is unknown",))
    return SimpleNamespace(job="gpt", batch=8, machine=machine, found=found, one=one)


def test_the_table_ranks_and_says_why():
    text = str(plans_text(plans(estimate(Plan(), 0.1, 50), estimate(Plan(data=2), 0.2, 50),
                                refused=[Refused(Plan(tensor=2), "three heads")])))  # fmt: skip
    assert "1 device: a step takes 100 ms; with data=2 it takes 200 ms." in text
    assert "refused: tensor=2: three heads" in text
    assert "not rehearsed, for want of time: 1 plan." in text
    assert "note: the network is unknown" in text


def test_what_does_not_fit_says_by_how_much_and_what_would_change_it():
    text = str(plans_text(plans(estimate(Plan(data=2), 0.1, 200), estimate(Plan(data=2, recompute="full"), 0.15, 150))))
    assert "data=2 does not fit: 180 B to 220 B of 100 B." in text
    assert "No plan fits: the nearest is 80 B over." in text
    assert "recompute=full: -50 B, +50% time; does not fit" in text


def test_the_one_that_was_asked_about_is_judged_alone():
    text = str(plans_text(plans(estimate(Plan(data=2), 0.1, 96), one=True)))
    assert "data=2 is too close to call: 86 B to 106 B of 100 B." in text


def test_words_are_settings():
    assert plan_words(Plan(data=2, zero1=True, offload=("optimizer",))) == "data=2 zero1=true offload=optimizer,"


def test_every_figure_is_in_the_json():
    told = json.loads(json.dumps(plans_dict(plans(estimate(Plan(data=2), 0.1, 95)))))
    assert told["plans"][0]["memory"]["verdict"] == "too close to call"
    assert told["plans"][0]["plan"] == {"data": 2}
    assert told["not_rehearsed"] == [{"data": 8}]
