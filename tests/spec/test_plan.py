"""A plan prints as it is written, survives its file, and refuses what it does not know."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwise.spec.errors import PlanError
from meshwise.spec.plan import PRECISIONS, Plan, plan_from_toml, plan_to_toml

counts = st.integers(1, 2**40)
plans = st.builds(Plan, data=counts, accumulate=counts, precision=st.sampled_from(list(PRECISIONS)), bucket_mb=counts)


@given(plans)
def test_a_plan_prints_as_it_is_written(plan: Plan) -> None:
    assert eval(repr(plan)) == plan


@pytest.mark.parametrize(
    ("plan", "text"),
    [
        (Plan(), "Plan(data=1)"),
        (Plan(data=2), "Plan(data=2)"),
        (Plan(data=2, accumulate=1, precision="bf16"), "Plan(data=2, precision='bf16')"),
        (Plan(4, 2, "fp64", 1), "Plan(data=4, accumulate=2, precision='fp64', bucket_mb=1)"),
    ],
)
def test_only_what_says_something_is_printed(plan: Plan, text: str) -> None:
    assert repr(plan) == text


@given(plans)
def test_a_plan_comes_back_from_its_file(plan: Plan) -> None:
    assert plan_from_toml(plan_to_toml(plan)) == plan


def test_a_plan_file_names_every_field() -> None:
    assert plan_to_toml(Plan(data=2)) == 'data = 2\naccumulate = 1\nprecision = "fp32"\nbucket_mb = 25\n'


def test_what_a_plan_file_leaves_out_has_its_default() -> None:
    assert plan_from_toml("data = 3") == Plan(data=3)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("acumulate = 2", "no field 'acumulate'. Did you mean 'accumulate'?"),
        ("shard = 2", "Known are accumulate, bucket_mb, data, precision."),
        ("data = ", "not TOML"),
        ("data = 2.0", "data=2.0: must be a whole number of at least 1"),
        ("precision = ['fp32']", "precision=['fp32'] is not known"),
    ],
)
def test_a_plan_file_that_cannot_be_is_told_in_one_sentence(text: str, says: str) -> None:
    with pytest.raises(PlanError) as caught:
        plan_from_toml(text)
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"data": 0}, "data=0: must be a whole number of at least 1. Write data=1."),
        ({"accumulate": -1}, "accumulate=-1"),
        ({"bucket_mb": 1.5}, "bucket_mb=1.5"),
        ({"data": True}, "data=True"),
        ({"data": "2"}, "data='2'"),
        ({"precision": "pf16"}, "Did you mean 'fp16'?"),
        ({"precision": "int8"}, "Use one of fp32, bf16, fp16, fp64."),
    ],
)
def test_values_that_make_no_plan_are_refused(values: dict[str, Any], says: str) -> None:
    with pytest.raises(PlanError) as caught:
        Plan(**values)
    assert says in str(caught.value)


def test_a_plan_needs_one_device_a_replica() -> None:
    assert Plan(data=3, accumulate=5).devices == 3
