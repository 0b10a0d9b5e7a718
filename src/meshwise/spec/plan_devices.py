"""Change a plan to fit another number of devices.

The new number is 1, or the number of devices that a run still has. An error names the nearest plan that fits.
"""

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
    """Raise PlanError unless the plan needs exactly `devices` devices. The message names the nearest plan that does."""
    if plan.devices == devices:
        return
    use = ", ".join(f"{axis}={value}" for axis, value in _nearest_axes(plan, devices).items())
    raise PlanError(
        f"{_axes_text(plan)} needs {plural(plan.devices, 'device')}, but this run has {devices}. "
        f"Use {use}, or start {plural(plan.devices, 'worker')} with --devices."
    )


def _axes_text(plan: Plan) -> str:
    shown = [axis for axis in AXES if getattr(plan, axis) > 1] or AXES[:1]
    return " x ".join(f"{axis}={getattr(plan, axis)}" for axis in shown)


def _nearest_axes(plan: Plan, devices: int) -> dict[str, int]:
    """Find sizes of the mesh axes that need exactly `devices` devices and are close to the plan's sizes."""
    choices = [dict(zip(AXES, sizes, strict=True)) for sizes in factorisations(devices, len(AXES))]
    possible = [choice for choice in choices if _is_possible(plan, choice)] or choices

    def distance(choice: dict[str, int]) -> tuple[int, float, int]:
        ratios = sum(abs(math.log(size / getattr(plan, axis))) for axis, size in choice.items())
        new = sum(size > 1 and getattr(plan, axis) == 1 for axis, size in choice.items())
        return new, round(ratios, 9), choice["data"]  # on a tie, prefer less `data`, whose ranks each copy the model

    best = min(possible, key=distance)
    return {axis: size for axis, size in best.items() if size != getattr(plan, axis)}


def factorisations(number: int, count: int) -> Iterator[tuple[int, ...]]:
    """Yield all tuples of `count` factors whose product is `number`."""
    divisors = [divisor for divisor in range(1, number + 1) if number % divisor == 0]
    return (factors for factors in itertools.product(divisors, repeat=count) if math.prod(factors) == number)


def _is_possible(plan: Plan, values: dict[str, Any]) -> bool:
    try:
        replace(plan, **values)
    except PlanError:
        return False
    return True


_OFF: dict[str, Any] = {f.name: f.default for f in fields(Plan) if f.metadata.get("conflicts") and f.name not in AXES}
"""The techniques that may be impossible for another number of devices, each with the value that turns it off."""


def on_one_device(plan: Plan) -> Plan:
    """Return `plan` for one device: all axes are 1, and techniques that need several devices are off."""
    return _with_possible(replace(plan, **(_OFF | dict.fromkeys(AXES, 1))), plan)


def on_devices(plan: Plan, devices: int) -> Plan:
    """Return `plan` changed to fit at most this many devices, with the same global batch.

    Some devices may be left unused. Only the axes `data` and `shard` change. Techniques that are no longer possible are
    turned off. Raises PlanError if no such plan is possible.
    """
    fixed = plan.devices // (plan.data * plan.shard)
    for parts in range(devices // fixed, 0, -1):
        divisors = [size for size in range(1, parts + 1) if parts % size == 0]
        least = [size for size in divisors if size >= plan.shard] or divisors[-1:]
        # Use at least as many shards as before, so that a shard still fits on a device.
        shard = 1 if plan.shard == 1 else least[0]
        axes: dict[str, Any] = {"data": parts // shard, "shard": shard}
        if axes == {"data": plan.data, "shard": plan.shard}:
            return plan
        bare = _OFF | axes
        if _is_possible(plan, bare):
            return _with_possible(replace(plan, **bare), plan)
    raise PlanError(f"{_axes_text(plan)} needs at least {plural(fixed, 'device')}, but the run now has {devices}.")


def _with_possible(bare: Plan, plan: Plan) -> Plan:
    """Return `bare` with those techniques of `plan`, such as `zero1`, that are possible for it."""
    for name in _OFF:
        value = getattr(plan, name)
        if isinstance(value, tuple):
            value = tuple(word for word in value if _is_possible(bare, {name: (word,)}))
        if _is_possible(bare, {name: value}):
            bare = replace(bare, **{name: value})
    return bare
