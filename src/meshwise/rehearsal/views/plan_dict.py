"""Convert a job's plans to plain values, for `--json`.

Tested in tests/rehearsal/test_plan_text.py.
"""

from __future__ import annotations

from typing import Any

from meshwise.rehearsal.estimate import Estimate
from meshwise.rehearsal.explain import Explanation
from meshwise.spec.json_values import json_value
from meshwise.spec.plan import changed


def plans_dict(plans: Any) -> dict[str, Any]:
    """Convert the result of a search (`api.plan.Plans`) to plain values. Times are in seconds, memory is in bytes."""
    found = plans.found
    return {
        "job": plans.job,
        "batch_size": plans.batch,
        "machine": plans.machine.name,
        "seconds": round(found.seconds, 3),
        "plans": [estimate_dict(each) | {"device_hours": plans.device_hours(each)} for each in found.estimates],
        "refused": [{"plan": json_value(changed(each.plan)), "why": each.why} for each in found.refused],
        "not_rehearsed": [json_value(changed(each)) for each in found.left],
        "likely_slower": len(found.worse),
        "training": {"steps": plans.steps},
        "explained": None if plans.explained is None else explanation_dict(plans.explained),
        "memory": json_value(plans.memory),
        "warnings": [*plans.said, *plans.machine.warnings],
    }


def estimate_dict(estimate: Estimate) -> dict[str, Any]:
    """Convert the estimate of one plan to plain values."""
    values: dict[str, Any] = json_value(estimate)
    values["plan"] = json_value(changed(estimate.plan))
    values["memory"]["verdict"] = estimate.memory.verdict
    values["samples_per_second"] = estimate.rate
    return values


def explanation_dict(explanation: Explanation) -> dict[str, Any]:
    """Convert the explanation of a step to plain values."""
    values: dict[str, Any] = json_value(explanation)
    phases: dict[str, dict[str, float]] = {}
    for (phase, kind), seconds in explanation.time.phases.items():
        phases.setdefault(phase, {})[kind] = seconds
    values["time"]["phases"] = phases
    del values["estimate"], values["runner_up"]
    return {"plan": json_value(changed(explanation.estimate.plan)), **values}
