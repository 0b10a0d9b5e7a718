"""What the user asked for survives in run.json, and a resumed run takes from there what is left open."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from typing import Any

import pytest

from meshwise.spec.errors import UsageError
from meshwise.spec.plan import Plan
from meshwise.training.request import RunRequest, completed, plan_of, settings_of, to_record

FULL = RunRequest("mlp", "2xcpu", 3, 64, 2, "bf16", 7, "folder", 10, 50)


def recorded(request: RunRequest) -> Any:
    """The facts of a run, through a file and back."""
    return json.loads(json.dumps({"request": to_record(request), "status": "stopped"}))


def test_a_request_survives_its_record() -> None:
    assert completed(RunRequest(), recorded(FULL)) == FULL


@pytest.mark.parametrize("name", [field.name for field in fields(RunRequest) if field.name != "job"])
def test_what_is_said_anew_goes_before_the_record(name: str) -> None:
    other: Any = "other" if isinstance(getattr(FULL, name), str) else 0  # 0 is said, not left open
    assert completed(RunRequest(**{name: other}), recorded(FULL)) == replace(FULL, **{name: other})


def test_the_same_job_may_be_named_again_but_no_other() -> None:
    assert completed(RunRequest(job="mlp"), recorded(FULL)) == FULL
    with pytest.raises(UsageError, match=r"the run to resume is of job 'mlp', not 'gpt'\. Leave the job out"):
        completed(RunRequest(job="gpt"), recorded(FULL))


def test_the_plan_of_a_request_has_its_devices() -> None:
    assert plan_of(FULL, 2) == Plan(data=2, accumulate=2, precision="bf16")
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
