"""What a cause is named from: both sides and what differs between them; and how evidence is put into words."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from meshwise.equivalence.compare import Comparison, Difference
from meshwise.equivalence.seen import Named, Side, Step
from meshwise.equivalence.sizes import LIMIT, rounded_to
from meshwise.spec.plan import Plan

ROUNDING = 2.0**-6  # of a tensor's length: four times what rounding to bfloat16 makes


@dataclass(frozen=True)
class Cause:
    """A cause of `CAUSES`, and the evidence for it, one sentence."""

    name: str
    evidence: str


@dataclass(frozen=True)
class Evidence:
    """All that is known when the cause of a first difference is asked for. made: the plan of the other side."""

    comparison: Comparison
    one: Side
    plan: Side
    made: Plan

    @property
    def ranks(self) -> int:
        return self.made.devices

    @property
    def drawing(self) -> set[str]:
        """Modules that draw random numbers themselves, on either side."""
        return self.one.drawing | self.plan.drawing

    def faults(self, kind: str, step: int) -> list[Difference]:
        return [d for d in self.comparison.differences if d.kind == kind and d.step == step and d.fault]

    def of_kind(self, kind: str, step: int) -> list[Difference]:
        return [d for d in self.comparison.differences if d.kind == kind and d.step == step]

    def count(self, kind: str, step: int) -> int:
        return len(self.of_kind(kind, step))

    def step(self, number: int) -> tuple[Step, Step]:
        return self.one.steps[number - 1], self.plan.steps[number - 1]

    def below(self, name: str) -> list[str]:
        """The modules inside a module."""
        return [other for other in self.comparison.modules if other != name and inside(other, name)]


def inside(name: str, block: str) -> bool:
    """Whether a module or parameter belongs to the module `block`, or is it."""
    return not block or f"{name}.".startswith(f"{block}.")


def owner_of(parameter: str) -> str:
    """The module that a parameter belongs to."""
    return parameter.rpartition(".")[0]


def before(side: Side, step: int) -> Named:
    """The parameters that a step begins with."""
    return side.initial if step == 1 else side.steps[step - 2].parameters


def scaled(difference: Difference) -> float | None:
    """The factor by which a gradient is that of one device, where nothing else is wrong with it."""
    factor, rest = difference.facts.get("factor", math.nan), difference.facts.get("rest", math.nan)
    return float(factor) if rest <= 1e3 * LIMIT and factor != 0 else None


def made_coarse(one: Tensor | None, plan: Tensor | None) -> str:
    """The lower precision that holds the plan's values exactly and those of one device not, where rounding explains how
    far they are apart; empty without one."""
    if one is None or plan is None or one.shape != plan.shape or not one.is_floating_point() or rounded_to(one):
        return ""
    return rounded_to(plan) if float((one - plan).norm()) <= ROUNDING * float(one.norm()) else ""


def near(a: float, b: float, limit: float = 1e-6) -> bool:
    """Whether two numbers are the same but for rounding."""
    return abs(a - b) <= limit * max(abs(a), abs(b), 1e-300)


def pair(difference: Difference) -> str:
    """Both figures of a difference."""
    one, plan = (difference.facts.get(side) for side in ("one device", "the plan"))
    return f"{number(plan)} under the plan and {number(one)} on one device"


def number(value: Any) -> str:
    """A figure in words."""
    return f"{value:.12g}" if isinstance(value, float) else str(value)


def some(what: str, items: Sequence[Any]) -> str:
    """The first three of several things."""
    if not items:
        return f"no {what}"
    shown = ", ".join(map(str, items[:3]))
    return f"{shown} and {len(items) - 3} more" if len(items) > 3 else shown


def repeated_text(name: str, difference: Difference) -> str:
    """Which samples count too often, and which do not."""
    repeated, missing = difference.facts.get("repeated", []), difference.facts.get("missing", [])
    parts = [f"sample {some('', repeated)} counts too often"] if repeated else []
    parts += [f"sample {some('', missing)} not at all"] if missing else []
    return f"{name}: {', '.join(parts)}."


def called_after(module: str, step: Step) -> Iterator[str]:
    """Modules whose calls end after the last call of `module`, in the first microbatch; not those that hold it."""
    names = [output.module for output in step.outputs if output.microbatch == 0]
    last = max((at for at, name in enumerate(names) if name == module), default=len(names))
    yield from (name for name in names[last + 1 :] if not inside(module, name))
