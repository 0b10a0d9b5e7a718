"""Make a plan from `field=value` settings, as a command line gives them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import fields, replace
from typing import Any

from meshwise.spec.errors import PlanError, nearest
from meshwise.spec.plan import AXES, OWN_DTYPES, RECOMPUTES, Plan, changed


def check_name(name: str) -> None:
    """Raise PlanError if a plan has no field of this name."""
    known = {f.name for f in fields(Plan)}
    if name not in known:
        raise PlanError(f"a plan has no field '{name}'.{nearest(name, known)} Fields are {', '.join(sorted(known))}.")


def at_precision(plan: Plan, precision: str) -> Plan:
    """Return the plan with this precision and the dtypes it implies.
    A plan of this precision stays unchanged."""
    if precision == plan.precision:
        return plan
    return replace(plan, precision=precision, **OWN_DTYPES)


def plan_from_settings(settings: Iterable[str], start: Plan | None = None) -> Plan:
    """Return the plan `start`, by default `Plan()`, with fields changed by `field=value` settings of a command line.

    Raises PlanError for a text that is not a setting.
    """
    return replace(start or Plan(), **settings_values(settings))


def settings_values(settings: Iterable[str]) -> dict[str, Any]:
    """Parse `field=value` settings to a dict of plan fields. Commas separate values: `offload=parameters,optimizer`.

    Raises PlanError for a text that is not a setting.
    """
    values: dict[str, Any] = {}
    for setting in settings:
        name, equals, text = (part.strip() for part in setting.partition("="))
        if not equals:
            raise PlanError(f"'{setting}' is not a setting of a plan. Use field=value, such as shard=4.")
        check_name(name)
        if name in values:
            raise PlanError(f"{name} is set twice, the second time by '{setting}'. Set it once.")
        values[name] = _value_of(name, text)
    return values


def setting_text(name: str, value: Any) -> str:
    """Format a field of a plan as the setting `field=value`, which `plan_from_settings` reads."""
    if isinstance(value, tuple | list):
        value = ",".join(map(str, value)) + "," * (name == "recompute" and len(value) == 1)
    return f"{name}={str(value).lower() if isinstance(value, bool) else value}"


def setting_texts(plan: Plan) -> list[str]:
    """Return each non-default field of a plan as a setting: `shard=8`."""
    return [setting_text(name, value) for name, value in changed(plan).items()]


def settings_text(plan: Plan) -> str:
    """Format the non-default fields of a plan as settings on one line: `shard=8 accumulate=2`."""
    return " ".join(setting_texts(plan))


def plan_on(devices: int, settings: Sequence[str]) -> Plan:
    """Return the plan that `field=value` settings describe for this many devices.

    If `data` is not set, it is chosen so that all devices are used: with `shard=2`, 8 devices need `data=4`. If no
    `data` uses exactly all devices, it is 1.
    """
    axes = [setting for setting in settings if setting.partition("=")[0].strip() in AXES]
    if any(setting.partition("=")[0].strip() == "data" for setting in axes):
        return plan_from_settings(settings)
    taken = devices_of(axes)
    return plan_from_settings(settings, Plan(data=devices // taken if devices % taken == 0 else 1))


def devices_of(axes: Iterable[str]) -> int:
    """Return how many devices settings of axes need: `data=2` and `shard=4` need 8.

    A setting whose value is not a positive integer is ignored.
    """
    values = [_value_of(name.strip(), text.strip()) for name, _, text in (axis.partition("=") for axis in axes)]
    return math.prod(value for value in values if isinstance(value, int) and value > 0)


def _value_of(name: str, text: str) -> Any:
    default = getattr(Plan(), name)
    if default is None:
        return None if text in ("", "none") else text
    if isinstance(default, bool):
        return {"true": True, "false": False}.get(text.lower(), text)
    if isinstance(default, int):
        try:
            return int(text)
        except ValueError:
            return text
    if isinstance(default, tuple):
        return () if text in ("", "none") else tuple(part.strip() for part in text.split(","))
    if name == "recompute" and text not in RECOMPUTES and ("," in text or "." in text):
        return tuple(part.strip() for part in text.split(",") if part.strip())
    return text
