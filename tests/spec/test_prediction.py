"""A prediction lies in the file of its plan, is read back as it was, and is no field of the plan."""

import pytest

from meshwise.spec.errors import PlanError
from meshwise.spec.plan import Plan
from meshwise.spec.plan_file import plan_from_toml, plan_to_toml
from meshwise.spec.prediction import Prediction, prediction_in, prediction_to_toml

WHOLE = Prediction(
    'a "job"', 64, "2xcpu", "catalog 90 %", 1.5e-05, 1e-05, 2.0, {"forward": 0.5}, {"allocated": 12}, {"input": 3}
)


@pytest.mark.parametrize("prediction", [WHOLE, Prediction("gpt", 8, "4xcpu")])
def test_a_prediction_is_read_back_and_the_plan_is_what_it_was(prediction):
    plan = Plan(shard=2, recompute="full")
    text = plan_to_toml(plan) + prediction_to_toml(prediction)
    assert prediction_in(text) == prediction
    assert plan_from_toml(text) == plan


def test_a_plan_without_one_has_none():
    assert prediction_in(plan_to_toml(Plan())) is None


@pytest.mark.parametrize("table", ['job = "gpt"', 'job = 3\nbatch_size = 8\nmachine = "x"', "seconds = 1\nother = 2"])
def test_a_damaged_one_says_what_to_do(table):
    with pytest.raises(PlanError, match=r"is damaged\. Remove it"):
        prediction_in(f"data = 2\n[predicted]\n{table}\n")


def test_a_number_that_is_none_is_damage():
    with pytest.raises(PlanError, match="is damaged"):
        prediction_in('[predicted]\njob = "gpt"\nbatch_size = 8\nmachine = "x"\n[predicted.kinds]\nforward = "long"\n')
