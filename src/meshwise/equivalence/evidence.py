"""What a cause is named from: both sides and what differs between them; and how evidence is put into words."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from meshwise.equivalence.causes import Cause, CauseKind
from meshwise.equivalence.compare import Comparison, Difference
from meshwise.equivalence.tolerance import LIMIT, precision_of
from meshwise.equivalence.trace import Named, StepTrace, Trace
from meshwise.spec.plan import Plan
from meshwise.spec.words import some

ROUNDING = 2.0**-6  # of a tensor's length: four times what rounding to bfloat16 makes


@dataclass(frozen=True)
class Evidence:
    """All that is known when the cause of a first difference is searched for. plan: the plan of `actual`."""

    comparison: Comparison
    reference: Trace
    actual: Trace
    plan: Plan

    @property
    def random_modules(self) -> set[str]:
        """Modules that draw random numbers themselves, on either side."""
        return self.reference.random_modules | self.actual.random_modules

    def of_kind(self, kind: str, step: int) -> list[Difference]:
        return [d for d in self.comparison.differences if d.kind == kind and d.step == step]

    def faults(self, kind: str, step: int) -> list[Difference]:
        return [d for d in self.of_kind(kind, step) if d.fault]

    def step(self, number: int) -> tuple[StepTrace, StepTrace]:
        """A step, from 1, on one device and under the plan."""
        return self.reference.steps[number - 1], self.actual.steps[number - 1]

    def class_of(self, output: Difference) -> str:
        return str(output.facts.get("class", ""))

    def inside(self, name: str) -> list[str]:
        """The modules inside a module."""
        return [other for other in self.comparison.modules if other != name and is_inside(other, name)]


Rule = Callable[[Difference, Evidence], Cause | None]
"""(first difference, evidence) -> its cause; None where the evidence does not speak for one."""


def says(kind: CauseKind, text: str, when: Callable[[Difference, Evidence], bool] = lambda *_: True) -> Rule:
    """The rule that names `kind` where `when` holds.

    text: the evidence, in which `{name}`, `{step}`, facts of the difference and so on are filled in.
    """

    def rule(first: Difference, evidence: Evidence) -> Cause | None:
        return Cause(kind, text.format_map(_words(first, evidence))) if when(first, evidence) else None

    return rule


def _words(first: Difference, evidence: Evidence) -> dict[str, Any]:
    return {
        **first.facts,
        "name": first.name or "the model",
        "step": first.step,
        "both": both_numbers(first),
        "samples": samples_text(first),
        "how_many": how_many(first, evidence),
    }


def how_many(first: Difference, evidence: Evidence) -> str:
    """How many of the gradients of a step differ."""
    compared = evidence.of_kind("gradients", first.step)
    return f"{sum(d.fault for d in compared)} of {len(compared)} gradients differ"


def ranks_differ(first: Difference, evidence: Evidence) -> bool:
    """Whether ranks differ from each other in what should be one value."""
    return "ranks apart" in first.facts


def other_samples(first: Difference, evidence: Evidence) -> bool:
    """Whether a sample counts too often, or not at all."""
    return bool(first.facts.get("repeated") or first.facts.get("missing"))


def is_inside(name: str, block: str) -> bool:
    """Whether a module or parameter belongs to the module `block`, or is it."""
    return not block or f"{name}.".startswith(f"{block}.")


def owner_of(parameter: str) -> str:
    """The module that a parameter belongs to."""
    return parameter.rpartition(".")[0]


def parameters_before(trace: Trace, step: int) -> Named:
    """The parameters that a step begins with."""
    return trace.initial_parameters if step == 1 else trace.steps[step - 2].parameters


def gradient_factor(difference: Difference) -> float | None:
    """The factor by which a gradient is that of one device, where nothing else is wrong with it."""
    factor, rest = difference.facts.get("factor", math.nan), difference.facts.get("rest", math.nan)
    return float(factor) if rest <= 1e3 * LIMIT and factor != 0 else None


def precision_lost(reference: Tensor | None, actual: Tensor | None) -> str:
    """The lower precision that holds the plan's values exactly and those of one device not, where rounding explains how
    much they differ; empty without one."""
    if reference is None or actual is None or reference.shape != actual.shape or not reference.is_floating_point():
        return ""
    rounding = float((reference - actual).norm()) <= ROUNDING * float(reference.norm())
    return precision_of(actual) if rounding and not precision_of(reference) else ""


def near(a: float, b: float, limit: float = 1e-6) -> bool:
    """Whether two numbers are the same but for rounding."""
    return abs(a - b) <= limit * max(abs(a), abs(b), 1e-300)


def both_numbers(difference: Difference) -> str:
    """Both figures of a difference."""
    one, plan = (number_text(difference.facts.get(side)) for side in ("one device", "the plan"))
    return f"{plan} under the plan and {one} on one device"


def number_text(value: Any) -> str:
    """A figure in words."""
    return f"{value:.12g}" if isinstance(value, float) else str(value)


def first_few(what: str, items: Sequence[Any]) -> str:
    """The first three of several things."""
    return some([str(item) for item in items]) if items else f"no {what}"


def samples_text(difference: Difference) -> str:
    """Which samples count too often, and which do not."""
    repeated, missing = difference.facts.get("repeated"), difference.facts.get("missing")
    parts = [f"sample {first_few('', repeated)} counts too often"] if repeated else []
    parts += [f"sample {first_few('', missing)} not at all"] if missing else []
    return ", ".join(parts)


def called_after(module: str, step: StepTrace) -> Iterator[str]:
    """Modules whose calls end after the last call of `module`, in the first microbatch; not those that contain it."""
    names = [output.module for output in step.outputs if output.microbatch == 0]
    last = max((at for at, name in enumerate(names) if name == module), default=len(names))
    yield from (name for name in names[last + 1 :] if not is_inside(module, name))
