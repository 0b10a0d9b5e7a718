"""What the user asked for survives in run.json, and a resumed run takes from there what is left open."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from typing import Any

import pytest

from meshwise.spec.errors import UsageError
from meshwise.spec.plan import Plan, plan_to_toml
from meshwise.training.request import RunRequest, completed, plan_of, settings_of, to_record

FULL = RunRequest("mlp", "2xcpu", 3, 64, 2, "bf16", 7, "folder", 10, 50, None, "bucket_mb=5")


def recorded(request: RunRequest) -> Any:
    """The facts of a run, through a file and back."""
    return json.loads(json.dumps({"request": to_record(request), "status": "stopped"}))


def test_a_request_survives_its_record() -> None:
    assert completed(RunRequest(), recorded(FULL)) == FULL


@pytest.mark.parametrize("name", [field.name for field in fields(RunRequest) if field.name != "job"])
def test_what_is_said_anew_goes_before_the_record(name: str) -> None:
    other: Any = "other" if isinstance(getattr(FULL, name), str) else 0  # 0 is said, not left open
    gone: Any = {"accumulate": None, "precision": None, "settings": None} if name == "plan" else {}
    assert completed(RunRequest(**{name: other}), recorded(FULL)) == replace(FULL, **gone, **{name: other})


@pytest.mark.parametrize(
    ("earlier", "given", "plan"),
    [
        (RunRequest(precision="bf16"), RunRequest(settings="precision=fp32"), Plan(data=2)),
        (RunRequest(accumulate=4), RunRequest(settings="accumulate=2"), Plan(data=2, accumulate=2)),
        (RunRequest(accumulate=4), RunRequest(settings="shard=2"), Plan(shard=2, accumulate=4)),
        (RunRequest(settings="shard=2"), RunRequest(plan="data = 2"), Plan(data=2)),
        (RunRequest(settings="precision=bf16"), RunRequest(precision="fp32"), Plan(data=2)),
        (RunRequest(plan='grad_dtype = "bf16"\nprecision = "bf16"'), RunRequest(precision="fp32"), Plan(data=2)),
    ],
)
def test_what_is_said_anew_of_the_plan_goes_before_it_in_other_words(
    earlier: RunRequest, given: RunRequest, plan: Plan
) -> None:
    assert plan_of(completed(given, recorded(earlier)), 2) == plan


def test_the_same_job_may_be_named_again_but_no_other() -> None:
    assert completed(RunRequest(job="mlp"), recorded(FULL)) == FULL
    with pytest.raises(UsageError, match=r"the run to resume is of job 'mlp', not 'gpt'\. Leave the job out"):
        completed(RunRequest(job="gpt"), recorded(FULL))


def test_the_plan_of_a_request_has_its_devices() -> None:
    assert plan_of(FULL, 2) == Plan(data=2, accumulate=2, precision="bf16", bucket_mb=5)
    assert plan_of(RunRequest(), 4) == Plan(data=4)
    with pytest.raises(UsageError, match="accumulate=0"):
        plan_of(RunRequest(accumulate=0), 1)


def test_settings_override_only_what_was_said() -> None:
    settings = settings_of(RunRequest(), Plan(), resume=False)
    assert (settings.epochs, settings.batch_size, settings.seed, settings.save_every) == (None, None, None, None)
    assert (settings.log_every, settings.resume) == (100, False)
    settings = settings_of(FULL, Plan(data=2), resume=True)
    assert (settings.plan, settings.epochs, settings.batch_size, settings.seed) == (Plan(data=2), 3, 64, 7)
    assert (settings.log_every, settings.save_every, settings.resume) == (10, 50, True)


@pytest.mark.parametrize(("name", "option"), [("log_every", "--log-every 0"), ("save_every", "--save-every 0")])
def test_every_no_step_is_told(name: str, option: str) -> None:
    with pytest.raises(UsageError, match=f"{option}: must be at least 1"):
        settings_of(RunRequest(**{name: 0}), Plan(), resume=False)


def test_settings_and_a_plan_file_make_the_plan() -> None:
    assert plan_of(RunRequest(settings="recompute=full bucket_mb=1"), 2) == Plan(data=2, recompute="full", bucket_mb=1)
    assert plan_of(RunRequest(settings="zero1=true"), 2) == Plan(data=2, zero1=True)
    assert plan_of(RunRequest(settings="shard=2"), 4) == Plan(data=2, shard=2)
    file = plan_to_toml(Plan(data=4, accumulate=2))
    assert plan_of(RunRequest(plan=file, settings="accumulate=3", precision="bf16"), 8) == Plan(
        data=4, accumulate=3, precision="bf16"
    )
    assert completed(RunRequest(), recorded(RunRequest("mlp", plan=file, settings="data=2"))).plan == file
