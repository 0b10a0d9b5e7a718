"""Read and write plans as TOML files.

Every field is written, and every error names the file.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from meshwise.spec.errors import PlanError
from meshwise.spec.plan import AXES, Plan
from meshwise.spec.plan_settings import check_name

PREDICTED = "predicted"
"""A plan file may have a table of this name, with a prediction. It is not a field of the plan (spec/prediction.py)."""


def plan_to_toml(plan: Plan) -> str:
    """Return the plan as the text of a TOML file, with a line for every field. If the plan takes a dtype from
    `precision`, the line of this dtype is commented out."""
    implied = plan.dtypes.by_field
    lines = []
    for f in fields(plan):
        value = getattr(plan, f.name)
        # TOML and JSON write a bool, a number, a text or a list of texts in the same way.
        line = f"{f.name} = {json.dumps(implied[f.name] if value is None else value, ensure_ascii=False)}\n"
        lines.append(f"# {line}" if value is None else line)
    return "".join(lines)


def plan_from_toml(text: str, devices: int = 1, over: Mapping[str, Any] | None = None) -> Plan:
    """Read a plan from the text of a plan file. If the text names no axis, `data` is set to `devices`.

    Raises PlanError if the text is not TOML or names an unknown field.
    over: values that replace the values of the file.
    """
    values = plan_values(text)
    if not any(axis in values for axis in AXES):
        values["data"] = devices
    return Plan(**values | dict(over or {}))


def plan_values(text: str) -> dict[str, Any]:
    """Return the fields that the text of a plan file sets. Raises PlanError if it is not TOML or a field is unknown."""
    try:
        values = tomllib.loads(text)
    except RecursionError:
        raise PlanError("tables or lists are nested too deep. A plan file has lines such as shard = 2.") from None
    except ValueError as error:  # TOMLDecodeError, or a number that Python refuses to read
        raise PlanError(f"the plan file is not TOML: {error}.") from None
    values.pop(PREDICTED, None)
    for name in values:
        check_name(name)
    return values


def plan_text(file: str | Path) -> str:
    """Return the text of a plan file. Raises PlanError, which names the file, if this fails."""
    try:
        text = Path(file).read_text(encoding="utf-8-sig")  # some editors write a byte order mark
        plan_values(text)
    except (OSError, ValueError) as error:  # ValueError: not UTF-8, or a null character in the file name
        why = error.strerror if isinstance(error, OSError) else "it is not text"
        raise PlanError(f"{file}: no plan can be read ({why}). Name a plan file, such as a run's plan.toml.") from None
    except PlanError as error:
        raise PlanError(f"{file}: {error}") from None
    return text


def read_plan(file: str | Path, devices: int, over: Mapping[str, Any] | None = None) -> Plan:
    """Read a plan from a file. If the file sets no mesh axis, the axis `data` is set to `devices`.

    Raises PlanError if the file cannot be read, or if the plan is not valid.

    over: values that replace the values of the file.
    """
    return plan_from_toml(plan_text(file), devices, over)
