"""A plan on another number of devices than its own: refused with the nearest that fits, or brought to one device."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import fields, replace
from typing import Any

from meshwise.spec.errors import PlanError
from meshwise.spec.plan import AXES, Plan
from meshwise.spec.units import plural


def check_devices(plan: Plan, devices: int) -> None:
    """Raises PlanError, with the nearest plan that fits, when the plan needs another number than `devices`."""
    if plan.devices == devices:
        return
    use = ", ".join(f"{axis}={value}" for axis, value in _nearest_axes(plan, devices).items())
    raise PlanError(
        f"{_axes_text(plan)} needs {plural(plan.devices, 'device')}; this run has {devices}. "
        f"Use {use}, or start {plural(plan.devices, 'worker')} with --devices."
    )


def _axes_text(plan: Plan) -> str:
    shown = [axis for axis in AXES if getattr(plan, axis) > 1] or AXES[:1]
    return " x ".join(f"{axis}={getattr(plan, axis)}" for axis in shown)


def _nearest_axes(plan: Plan, devices: int) -> dict[str, int]:
    """The axes to change, and their values, so that the plan fills `devices`: the sizes nearest in ratio."""
    choices = [dict(zip(AXES, sizes, strict=True)) for sizes in factorisations(devices, len(AXES))]
    possible = [choice for choice in choices if _is_possible(plan, choice)] or choices

    def distance(choice: dict[str, int]) -> tuple[int, float, int]:
        ratios = sum(abs(math.log(size / getattr(plan, axis))) for axis, size in choice.items())
        new = sum(size > 1 and getattr(plan, axis) == 1 for axis, size in choice.items())
        return new, round(ratios, 9), choice["data"]  # of two as near, the one that holds the larger model

    best = min(possible, key=distance)
    return {axis: size for axis, size in best.items() if size != getattr(plan, axis)}


def factorisations(number: int, count: int) -> Iterator[tuple[int, ...]]:
    """All ways to write `number` as a product of `count` factors."""
    divisors = [divisor for divisor in range(1, number + 1) if number % divisor == 0]
    return (factors for factors in itertools.product(divisors, repeat=count) if math.prod(factors) == number)


def _is_possible(plan: Plan, values: dict[str, Any]) -> bool:
    try:
        replace(plan, **values)
    except PlanError:
        return False
    return True


def on_one_device(plan: Plan) -> Plan:
    """`plan` without its axes, and without what cannot be on one device."""
    techniques = [f for f in fields(plan) if f.metadata.get("conflicts")]
    off: dict[str, Any] = {**dict.fromkeys(AXES, 1), **{f.name: f.default for f in techniques}}
    one = replace(plan, **off)
    for f in techniques:
        value = getattr(plan, f.name)
        if isinstance(value, tuple):
            value = tuple(word for word in value if _is_possible(one, {f.name: (word,)}))
        if _is_possible(one, {f.name: value}):
            one = replace(one, **{f.name: value})
    return one
