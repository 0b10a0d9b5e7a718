"""Store a predicted step in its plan file, in the table `[predicted]`."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from meshwise.spec.errors import PlanError
from meshwise.spec.plan_file import PREDICTED

COMMENT = "# The prediction of meshwise plan; a run's report compares it with the measurement."


@dataclass(frozen=True)
class Prediction:
    """What `meshwise plan` predicted for one plan of a job.

    machine: the name of the machine for which the prediction was made.
    origin: where the predicted times of operations come from, with their percentages of the step, such as `catalog 80
        %, model 20 %`.
    seconds: the time of a step. None if the speed of the machine is unknown.
    low, high: the bounds of the 80 % interval of `seconds`. None if the bounds are unknown.
    kinds: the seconds of the step by kind of work, as in a report, averaged over ranks.
    memory: the bytes of memory on the rank that needs the most. The keys are `allocated`, `reserved` and `device`,
        which are also the names of the memory counters of a run.
    categories: the parts of the allocated bytes.
    """

    job: str
    batch_size: int
    machine: str
    origin: str = ""
    seconds: float | None = None
    low: float | None = None
    high: float | None = None
    kinds: Mapping[str, float] = field(default_factory=dict)
    memory: Mapping[str, float] = field(default_factory=dict)
    categories: Mapping[str, float] = field(default_factory=dict)


def prediction_to_toml(prediction: Prediction) -> str:
    """Return the prediction as the table [predicted], to be added to the text of a plan file."""
    values = {each.name: getattr(prediction, each.name) for each in fields(prediction)}
    tables = {name: value for name, value in values.items() if isinstance(value, Mapping) and value}
    plain = {name: value for name, value in values.items() if not isinstance(value, Mapping) and value is not None}
    lines = ["", COMMENT, f"[{PREDICTED}]", *_lines(plain)]
    for name, table in tables.items():
        lines += [f"[{PREDICTED}.{name}]", *_lines(table)]
    return "\n".join(lines) + "\n"


def prediction_in(text: str) -> Prediction | None:
    """Read the prediction in the text of a plan file. None if there is none. Raises PlanError if it is damaged."""
    values = tomllib.loads(text).get(PREDICTED)
    return None if values is None else prediction_of(values)


def prediction_of(values: Any) -> Prediction:
    """Make a prediction from a dict, such as the table of a file. Raises PlanError if fields or types are wrong."""
    try:
        found = Prediction(**values)
        numbers = [*found.kinds.values(), *found.memory.values(), *found.categories.values()]
        numbers += [value for value in (found.seconds, found.low, found.high) if value is not None]
        known = isinstance(found.job, str) and isinstance(found.machine, str) and isinstance(found.origin, str)
        if known and isinstance(found.batch_size, int) and all(type(value) in (int, float) for value in numbers):
            return found
    except (TypeError, AttributeError):
        pass
    raise PlanError(f"the table [{PREDICTED}] is damaged. Remove it, or save the plan again with meshwise plan --save.")


def _lines(values: Mapping[str, Any]) -> list[str]:
    return [f"{json.dumps(name)} = {json.dumps(value, ensure_ascii=False)}" for name, value in values.items()]
