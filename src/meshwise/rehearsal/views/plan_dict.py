"""The plans of a job as plain values, for `--json`. Tested in tests/rehearsal/test_plan_text.py."""

from __future__ import annotations

from typing import Any

from meshwise.rehearsal.estimate import Estimate
from meshwise.spec.json_values import json_value
from meshwise.spec.plan import changed


def plans_dict(plans: Any) -> dict[str, Any]:
    """`api.plan.Plans`; seconds and bytes."""
    found = plans.found
    return {
        "job": plans.job,
        "batch_size": plans.batch,
        "machine": plans.machine.name,
        "seconds": round(found.seconds, 3),
        "plans": [estimate_dict(each) for each in found.estimates],
        "refused": [{"plan": json_value(changed(each.plan)), "why": each.why} for each in found.refused],
        "not_rehearsed": [json_value(changed(each)) for each in found.left],
        "warnings": list(plans.machine.warnings),
    }


def estimate_dict(estimate: Estimate) -> dict[str, Any]:
    """One plan."""
    values: dict[str, Any] = json_value(estimate)
    values["plan"] = json_value(changed(estimate.plan))
    values["memory"]["verdict"] = estimate.memory.verdict
    return values
