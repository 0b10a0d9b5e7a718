"""What a cause is named from: both sides and what differs between them; and how evidence is put into words."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from meshwise.equivalence.causes import Cause, CauseKind
from meshwise.equivalence.compare import Comparison, Difference
from meshwise.equivalence.noise import NOISE
from meshwise.equivalence.tolerance import largest, precision_of
from meshwise.equivalence.trace import StepTrace, Trace
from meshwise.spec.plan import Plan
from meshwise.spec.words import some

ROUNDING = 2.0**-6  # of a tensor's length: four times what rounding to bfloat16 makes


@dataclass(frozen=True)
class Evidence:
    """All that is known when the cause of the first difference is searched for. plan: the plan of `actual`."""

    first: Difference
    comparison: Comparison
    reference: Trace
    actual: Trace
    plan: Plan

    @property
    def steps(self) -> tuple[StepTrace, StepTrace]:
        """The step of the first difference, on one device and under the plan."""
        return self.reference.steps[self.first.step - 1], self.actual.steps[self.first.step - 1]

    def of_kind(self, kind: str) -> list[Difference]:
        """What was compared of a kind in that step."""
        return [d for d in self.comparison.differences if d.kind == kind and d.step == self.first.step]

    def faults(self, kind: str) -> list[Difference]:
        """What differs of a kind in that step."""
        return [d for d in self.of_kind(kind) if d.fault]

    def gradients(self) -> list[Difference]:
        """What was compared of the gradients of that step; those that are rounding and no fault are left out."""
        values = self.steps[0].gradients
        noise = NOISE * largest(values.values())
        return [d for d in self.of_kind("gradients") if d.fault or largest([values[d.name]]) > noise]

    def ranks_differ(self) -> bool:
        """Whether ranks differ from each other in what should be one value."""
        return "ranks apart" in self.first.facts

    def other_samples(self) -> bool:
        """Whether a sample counts too often, or not at all."""
        return bool(self.first.facts.get("repeated") or self.first.facts.get("missing"))

    def how_many(self) -> str:
        """How many of the gradients of that step differ."""
        return f"{len(self.faults('gradients'))} of {len(self.of_kind('gradients'))} gradients differ"

    def both_numbers(self) -> str:
        """Both figures of the first difference."""
        figures = (self.first.facts.get(side) for side in ("the plan", "one device"))
        plan, one = (f"{value:.12g}" if isinstance(value, float) else str(value) for value in figures)
        return f"{plan} under the plan and {one} on one device"

    def samples_text(self) -> str:
        """Which samples count too often, and which do not."""
        ends = {"repeated": "counts too often", "missing": "not at all"}
        found = {end: [str(index) for index in self.first.facts.get(fact, ())] for fact, end in ends.items()}
        text = ", ".join(f"sample {some(indices)} {end}" for end, indices in found.items() if indices)
        if self.first.kind != "sample order":
            return text
        places = [each.place for each in self.steps[1].contents if each.place]
        return f"{text}, in the loop at {places[0]}" if places else text


Rule = Callable[[Evidence], Cause | None]
"""The cause of the first difference; None where the evidence does not speak for one."""


def says(kind: CauseKind, text: str | Callable[[Evidence], str], *when: Callable[[Evidence], bool]) -> Rule:
    """The rule that names `kind` where all of `when` hold.

    text: the evidence, in which `{name}`, `{step}`, facts of the difference and so on are filled in; or what gives it,
    empty where it does not speak for this cause.
    """

    def rule(evidence: Evidence) -> Cause | None:
        if not all(holds(evidence) for holds in when):
            return None
        if callable(text):
            said = text(evidence)
            return Cause(kind, said) if said else None
        first = evidence.first
        words = {
            **first.facts,
            "name": first.name or "the model",
            "step": first.step,
            "both": evidence.both_numbers(),
            "samples": evidence.samples_text(),
            "how_many": evidence.how_many(),
        }
        return Cause(kind, text.format_map(words))

    return rule


def is_inside(name: str, block: str) -> bool:
    """Whether a module or parameter belongs to the module `block`, or is it."""
    return not block or f"{name}.".startswith(f"{block}.")


def owner_of(parameter: str) -> str:
    """The module that a parameter belongs to."""
    return parameter.rpartition(".")[0]


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
