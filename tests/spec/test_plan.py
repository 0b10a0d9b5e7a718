"""A plan prints as it is written, survives its file, and refuses what it does not know.

Tests spec/plan_settings.py too.
"""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwise.spec.dtypes import PRECISIONS, Dtypes
from meshwise.spec.errors import PlanError
from meshwise.spec.plan import OFFLOADS, RECOMPUTES, Plan
from meshwise.spec.plan_devices import check_devices
from meshwise.spec.plan_file import plan_from_toml, plan_to_toml, read_plan
from meshwise.spec.plan_settings import at_precision, plan_from_settings, setting_texts, settings_values

counts = st.integers(1, 2**40)
block_names = st.lists(st.text('abc.01_"\\', min_size=1), min_size=1, unique=True).map(tuple)


def made(**values: Any) -> Plan:
    """A plan of any fields, with those dropped that others make impossible."""
    if values["shard"] > 1 or values["data"] == 1:
        values["zero1"] = False
    if values["shard"] == 1:
        values["reshard"] = True
        values["offload"] = tuple(name for name in values["offload"] if name != "parameters")
    if values["recompute"] == "selective":
        values["compile"] = False
    if values["precision"] == "fp64":
        values["grad_dtype"] = None
    return Plan(**values)


plans = st.builds(
    made,
    data=counts,
    shard=counts,
    accumulate=counts,
    precision=st.sampled_from(list(PRECISIONS)),
    zero1=st.booleans(),
    recompute=st.sampled_from(list(RECOMPUTES)) | block_names,
    offload=st.lists(st.sampled_from(list(OFFLOADS)), unique=True).map(tuple),
    reshard=st.booleans(),
    compile=st.booleans(),
    bucket_mb=counts,
    grad_dtype=st.none() | st.just("bf16"),
)


@given(plans)
def test_a_plan_prints_as_it_is_written(plan: Plan) -> None:
    assert eval(repr(plan)) == plan


@pytest.mark.parametrize(
    ("plan", "text"),
    [
        (Plan(), "Plan(data=1)"),
        (Plan(data=2), "Plan(data=2)"),
        (Plan(shard=4), "Plan(shard=4)"),
        (Plan(data=2, shard=4), "Plan(data=2, shard=4)"),
        (Plan(data=2, accumulate=1, precision="bf16"), "Plan(data=2, precision='bf16')"),
        (Plan(recompute=("blocks.0",)), "Plan(data=1, recompute=('blocks.0',))"),
        (Plan(shard=2, reshard=False, offload=("optimizer",)), "Plan(shard=2, offload=('optimizer',), reshard=False)"),
    ],
)
def test_only_what_says_something_is_printed(plan: Plan, text: str) -> None:
    assert repr(plan) == text


@given(plans)
def test_a_plan_comes_back_from_its_file(plan: Plan) -> None:
    assert plan_from_toml(plan_to_toml(plan)) == plan


def test_a_plan_file_names_every_field() -> None:
    assert plan_to_toml(Plan(data=2, offload=("activations", "optimizer"))) == (
        "data = 2\nshard = 1\nexpert = 1\npipeline = 1\ncontext = 1\ntensor = 1\nsequence = false\n"
        'schedule = "1f1b"\n'
        'accumulate = 1\nprecision = "fp32"\nzero1 = false\nrecompute = "none"\n'
        'offload = ["optimizer", "activations"]\nreduce_each = false\nreshard = true\ncompile = false\n'
        'batch_norm = "global"\nshares = []\nbucket_mb = 25\n'
        '# param_dtype = "fp32"\n# compute_dtype = "fp32"\n# grad_dtype = "fp32"\n'
    )


def test_what_follows_from_precision_is_a_comment_in_the_file_until_it_is_said() -> None:
    text = plan_to_toml(Plan(precision="bf16", grad_dtype="bf16"))
    assert '# param_dtype = "fp32"\n# compute_dtype = "bf16"\ngrad_dtype = "bf16"\n' in text
    assert plan_from_toml(text) == Plan(precision="bf16", grad_dtype="bf16")


def test_what_a_plan_file_leaves_out_has_its_default() -> None:
    assert plan_from_toml("data = 3") == Plan(data=3)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("acumulate = 2", "no field 'acumulate'. Did you mean 'accumulate'?"),
        (
            "colour = 2",
            "Fields are accumulate, batch_norm, bucket_mb, compile, compute_dtype, ",
        ),
        ("data = ", "not TOML"),
        ("data = 2.0", "data=2.0 must be a whole number of at least 1"),
        ("precision = ['fp32']", "precision=['fp32'] is not known"),
        ("offload = 'optimizer'", "offload='optimizer' must be a tuple of names"),
        ("recompute = [1]", "recompute=[1] must be a tuple of names"),
        ("data = 2\nshares = [1, 0]", "shares=[1, 0] must be numbers above 0, one for each replica"),
        ("data = 2\nshares = '21'", "shares='21' must be numbers above 0"),
        ("data = 4\nshares = [2, 1]", "shares=(2, 1): a batch is divided into 4 parts"),
        ("shares = [2]", "shares=(2,) has no effect with one replica"),
        ("recompute = 'encoder'", "or --set recompute=encoder, (with the comma)"),
    ],
)
def test_a_plan_file_that_cannot_be_is_told_in_one_sentence(text: str, says: str) -> None:
    with pytest.raises(PlanError) as caught:
        plan_from_toml(text)
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"data": 0}, "data=0 must be a whole number of at least 1. Use data=1."),
        ({"shard": 0}, "shard=0 must be a whole number of at least 1. Use shard=1."),
        ({"accumulate": -1}, "accumulate=-1"),
        ({"bucket_mb": 1.5}, "bucket_mb=1.5"),
        ({"data": True}, "data=True"),
        ({"data": "2"}, "data='2'"),
        ({"precision": "pf16"}, "Did you mean 'fp16'?"),
        ({"precision": "int8"}, "Use one of fp32, bf16, fp16, fp64."),
        ({"zero1": 1}, "zero1=1 must be True or False"),
        ({"zero1": True}, "data=1 has only one. Use data=2 or more"),
        ({"zero1": True, "data": 2, "shard": 2}, "zero1=True with shard=2: shard divides the optimizer's state"),
        ({"sequence": True}, "sequence=True has no effect with tensor=1. Remove it."),
        ({"reshard": False}, "reshard=False has no effect with shard=1. Remove it."),
        ({"reduce_each": True}, "reduce_each=True has no effect with shard=1. Remove it."),
        ({"reduce_each": True, "shard": 2}, "reduce_each=True has no effect with accumulate=1. Remove it."),
        ({"offload": ("parameters",)}, "shard=1 does not divide them. Use shard=2 or more, or offload='optimizer'"),
        ({"grad_dtype": "b16"}, "grad_dtype='b16' is not known. Did you mean"),
        ({"param_dtype": "fp16"}, "which stores in fp32 and computes in fp16"),
        ({"param_dtype": "bf16", "compute_dtype": "fp32"}, "compute_dtype must be equal to param_dtype, or narrower"),
        ({"param_dtype": "bf16", "precision": "fp16"}, "compute_dtype='fp16' with param_dtype='bf16'"),
        ({"precision": "fp64", "grad_dtype": "fp32"}, "fp64 cannot be mixed with other dtypes"),
        ({"compile": True, "recompute": "selective"}, "compiled code has no separate operators to select from"),
        ({"recompute": "ful"}, "Did you mean 'full'?"),
        ({"recompute": ()}, "recompute is empty"),
        ({"recompute": ("a", "a")}, "contains a name twice"),
        ({"offload": ("optimiser",)}, "Did you mean 'optimizer'?"),
    ],
)
def test_values_that_make_no_plan_are_refused(values: dict[str, Any], says: str) -> None:
    with pytest.raises(PlanError) as caught:
        Plan(**values)
    assert says in str(caught.value)


def test_a_plan_needs_one_device_for_each_part_of_each_replica() -> None:
    assert Plan(data=3, accumulate=5).devices == 3
    assert Plan(data=3, shard=4).devices == 12


@pytest.mark.parametrize(
    ("text", "devices", "plan"),
    [
        ("", 2, Plan(data=2)),
        ('recompute = "full"', 2, Plan(data=2, recompute="full")),
        ("zero1 = true", 4, Plan(data=4, zero1=True)),
        ("shard = 2", 4, Plan(shard=2)),
        ("data = 1", 4, Plan()),
    ],
)
def test_of_a_file_that_names_no_axis_replicas_fill_the_devices(text: str, devices: int, plan: Plan) -> None:
    assert plan_from_toml(text, devices) == plan


@pytest.mark.parametrize(
    ("plan", "devices", "says"),
    [
        (Plan(data=3), 2, "data=3 needs 3 devices, but this run has 2. Use data=2, or start 3 workers with --devices."),
        (Plan(data=3, shard=4), 8, "data=3 x shard=4 needs 12 devices, but this run has 8. Use data=2, or start 12"),
        (Plan(shard=4), 8, "shard=4 needs 4 devices, but this run has 8. Use shard=8,"),
        (Plan(data=2, shard=2), 3, "Use data=1, shard=3,"),
        (Plan(), 4, "data=1 needs 1 device, but this run has 4. Use "),
        (Plan(data=4, zero1=True), 2, "Use data=2,"),
    ],
)
def test_a_plan_for_another_number_of_devices_is_told_the_nearest(plan: Plan, devices: int, says: str) -> None:
    with pytest.raises(PlanError) as caught:
        check_devices(plan, devices)
    assert says in str(caught.value)


@given(plans, st.integers(1, 64))
def test_the_nearest_plan_fits(plan: Plan, devices: int) -> None:
    try:
        check_devices(plan, devices)
    except PlanError as error:
        use = str(error).partition("Use ")[2].partition(", or start")[0].split(", ")
        axes = {"data": plan.data, "shard": plan.shard, **{k: int(v) for k, v in (word.split("=") for word in use)}}
        assert axes["data"] * axes["shard"] == devices
    else:
        assert plan.devices == devices


@pytest.mark.parametrize(
    ("settings", "plan"),
    [
        ([], Plan()),
        (["shard=4", "recompute=full"], Plan(shard=4, recompute="full")),
        (["data = 2", "zero1=true"], Plan(data=2, zero1=True)),
        (["recompute=blocks.0,blocks.3"], Plan(recompute=("blocks.0", "blocks.3"))),
        (["recompute=encoder,"], Plan(recompute=("encoder",))),
        (["offload=parameters,optimizer", "shard=2"], Plan(shard=2, offload=("optimizer", "parameters"))),
        (["offload=none"], Plan()),
        (["precision=bf16", "grad_dtype=bf16"], Plan(precision="bf16", grad_dtype="bf16")),
        (["grad_dtype=none"], Plan()),
        (["data=2", "tensor=2", "shares=2,0.5"], Plan(data=2, tensor=2, shares=(2, 0.5))),
        (["data=2", "shares=3,3"], Plan(data=2)),
        (["shard=2", "reshard=False"], Plan(shard=2, reshard=False)),
    ],
)
def test_settings_make_a_plan(settings: list[str], plan: Plan) -> None:
    assert plan_from_settings(settings) == plan
    assert plan_from_settings(setting_texts(plan)) == plan


@pytest.mark.parametrize(
    ("plan", "dtypes"),
    [
        (Plan(), Dtypes("fp32", "fp32", "fp32")),
        (Plan(precision="bf16"), Dtypes("fp32", "bf16", "fp32")),
        (Plan(precision="fp16", grad_dtype="bf16"), Dtypes("fp32", "fp16", "bf16")),
        (Plan(param_dtype="bf16"), Dtypes("bf16", "bf16", "bf16")),
        (Plan(param_dtype="bf16", grad_dtype="fp32"), Dtypes("bf16", "bf16", "fp32")),
        (Plan(compute_dtype="fp16"), Dtypes("fp32", "fp16", "fp32")),
        (Plan(precision="fp64"), Dtypes("fp64", "fp64", "fp64")),
    ],
)
def test_precision_is_a_word_for_three_dtypes(plan: Plan, dtypes: Dtypes) -> None:
    assert plan.dtypes == dtypes and dtypes.scaled is (dtypes.computed == "fp16")


def test_another_precision_brings_its_own_dtypes() -> None:
    plan = Plan(shard=2, precision="bf16", grad_dtype="bf16")
    assert at_precision(plan, "bf16") is plan
    assert at_precision(plan, "fp64") == Plan(shard=2, precision="fp64")


def test_settings_lie_over_a_plan() -> None:
    assert plan_from_settings(["shard=4"], Plan(data=2, precision="bf16")) == Plan(data=2, shard=4, precision="bf16")


def test_values_over_a_plan_file_complete_it(tmp_path: Path) -> None:
    (file := tmp_path / "plan.toml").write_text("pipeline = 2\n")
    assert read_plan(file, 2, settings_values(["accumulate=3"])) == Plan(pipeline=2, accumulate=3)


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ("shard", "'shard' is not a setting of a plan. Use field=value"),
        ("shrad=2", "Did you mean 'shard'?"),
        ("shard=two", "shard='two' must be a whole number"),
        ("zero1=maybe", "zero1='maybe' must be True or False"),
        ("recompute=all", "recompute='all' is not known."),
    ],
)
def test_settings_that_cannot_be_are_told_in_one_sentence(setting: str, says: str) -> None:
    with pytest.raises(PlanError) as caught:
        plan_from_settings([setting])
    assert says in str(caught.value)


def test_a_field_is_set_once() -> None:
    with pytest.raises(PlanError, match="shard is set twice"):
        plan_from_settings(["shard=2", "shard=4"])
