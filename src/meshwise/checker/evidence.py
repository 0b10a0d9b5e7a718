"""Hold the evidence for a cause, and put it into words.

The evidence is the traces of both sides, and the differences between them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from meshwise.checker.causes import Cause, CauseKind
from meshwise.checker.compare import Comparison
from meshwise.checker.difference import Difference, precision_of
from meshwise.checker.exchanges import Exchange
from meshwise.checker.trace import StepTrace, Trace
from meshwise.spec.plan import Plan
from meshwise.spec.words import some

ROUNDING = 2.0**-6  # relative to a tensor's norm: four times bfloat16's rounding error


@dataclass(frozen=True)
class Evidence:
    """The plan, both traces and their differences, to find the cause of the first difference."""

    first: Difference
    comparison: Comparison
    reference: Trace
    actual: Trace
    plan: Plan

    @property
    def steps(self) -> tuple[StepTrace, StepTrace]:
        """The traces of the step with the first difference, on one device and under the plan."""
        return self.reference.steps[self.first.step - 1], self.actual.steps[self.first.step - 1]

    def of_kind(self, kind: str) -> list[Difference]:
        """Return all comparisons of values of one kind, such as "gradients", in the step of the first difference."""
        return [d for d in self.comparison.differences if d.kind == kind and d.step == self.first.step]

    def faults(self, kind: str) -> list[Difference]:
        """Return the comparisons of one kind, such as "gradients", that found a difference larger than `LIMIT`."""
        return [d for d in self.of_kind(kind) if d.fault]

    def not_seen(self, before: float = math.inf) -> str:
        """Return a phrase that names the modules whose outputs cannot be compared."""
        unseen = [each for each in self.comparison.unseen if each.step == self.first.step and each.at < before]
        names = some(dict.fromkeys(each.module or "the model" for each in unseen))
        return f" that can be compared (those of {names} cannot)" if names else ""

    def or_padding(self) -> str:
        """Return a sentence on padding as another possible cause, if ranks pad to different lengths."""
        theirs = dict[Any, list[int]]()
        for output in self.steps[1].outputs if self.plan.tensor == self.plan.context == 1 else ():
            theirs.setdefault(output.key, []).extend(output.shape[1:2])
        for one in self.steps[0].outputs:
            lengths = theirs.get(one.key, [])
            if one.shape[1:] and lengths and min(lengths) < one.shape[1] == max(lengths):
                text = f" Or the model reads padding: ranks pad to {some(lengths, 8)}, one device to {one.shape[1]}."
                if self.reference.random_modules:
                    text += " Dropout draws other numbers where padding stands in front."
                return f"{text} Pass a mask to every attention, also for its memory, or pad to one length."
        return ""

    def where(self, module: str) -> str:
        """Describe a module: its name, its class, and where the user wrote its forward."""
        at = self.reference.places.get(module)
        return f"{module or 'the model'} ({self.comparison.modules.get(module, '')}{f', {at}' if at else ''})"

    def calls(self) -> list[str]:
        """Return the modules in the order in which the first microbatch of the step calls them."""
        return [output.module for output in self.steps[0].outputs if output.microbatch == 0]

    def of_ranks(self, factor: float) -> str:
        """Return "4 times" or "1/4 of" if a factor is a number of ranks or one over it."""
        sizes = {getattr(self.plan, name) for name in ("devices", "data", "shard", "tensor", "context")} - {1}
        texts = {f"{size} times": size for size in sizes} | {f"1/{size} of": 1 / size for size in sizes}
        return next((text for text, value in texts.items() if near(factor, value)), "")

    def exchanges(self, module: str, *, sums: bool = False) -> list[Exchange]:
        """Return the collectives that the program calls in the forward of `module`. sums: only those that add up."""
        known = [each for each in self.actual.exchanges if each.module and (each.adds_up or not sums)]
        inside = [each for each in known if is_inside(each.module, module)]
        around = [each for each in known if is_inside(module, each.module)]
        nearest = max((each.module for each in around), key=len, default="")
        return inside or [each for each in around if each.module == nearest]

    def of_another_group(self, sums: list[Exchange]) -> str:
        """Return a sentence if a collective in `sums` adds up over the wrong process group."""
        alike = self.steps[1].alike
        wrong = [each for each in sums if each.ranks and set(each.ranks) != set(alike)]
        if not wrong or len(alike) < 2:
            return ""
        over, right = (some(ranks, 8) for ranks in (wrong[0].ranks, alike))
        text = f"{wrong[0].line} adds up over rank {over}, but the parts of the sum are on rank {right}"
        return f"{text}, which have the same samples: the collective uses the wrong process group."

    def ranks_differ(self) -> bool:
        """Return True if ranks have different values, although all should have the same."""
        return "ranks apart" in self.first.facts

    def other_samples(self) -> bool:
        """Return whether the plan reads a sample more often or less often than one device."""
        return bool(self.first.facts.get("repeated") or self.first.facts.get("missing"))

    def how_many(self) -> str:
        """Return a phrase that says how many gradients differ in the step of the first difference."""
        return f"{len(self.faults('gradients'))} of {len(self.of_kind('gradients'))} gradients differ"

    def both_numbers(self) -> str:
        """Return a phrase with both numbers, e.g. "2 under the plan and 1 on one device"."""
        figures = (self.first.facts.get(side) for side in ("the plan", "one device"))
        plan, one = (f"{value:.12g}" if isinstance(value, float) else str(value) for value in figures)
        return f"{plan} under the plan and {one} on one device"

    def samples_text(self) -> str:
        """Return a phrase that lists the samples that count too often, or not at all."""
        ends = {"repeated": "counts too often", "missing": "not at all"}
        found = {end: [str(index) for index in self.first.facts.get(fact, ())] for fact, end in ends.items()}
        text = ", ".join(f"sample {some(indices)} {end}" for end, indices in found.items() if indices)
        if self.first.kind != "sample order":
            return text
        places = [each.place for each in self.steps[1].contents if each.place]
        return f"{text}, in the loop at {places[0]}" if places else text


Rule = Callable[[Evidence], Cause | None]
"""A function that returns one particular cause if the evidence supports it, and None otherwise."""


def says(kind: CauseKind, text: str | Callable[[Evidence], str], *when: Callable[[Evidence], bool]) -> Rule:
    """Make a rule that returns a `Cause` of this kind if all conditions in `when` hold."""

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
            "times": f": they are {first.factor:.12g} times those of one device" if first.factor else "",
            "samples": evidence.samples_text(),
            "how_many": evidence.how_many(),
            "outputs": f"module outputs{evidence.not_seen()} are equal",
            "before": f"everything before it{evidence.not_seen(first.facts.get('at', math.inf))} is equal",
        }
        return Cause(kind, text.format_map(words))

    return rule


def is_inside(name: str, block: str) -> bool:
    """Return whether `name`, a module or parameter, is the module `block` or lies inside that module."""
    return not block or f"{name}.".startswith(f"{block}.")


def owner_of(parameter: str) -> str:
    """Return the name of the module that owns a parameter."""
    return parameter.rpartition(".")[0]


def precision_lost(reference: Tensor | None, actual: Tensor | None) -> str:
    """Return the lower precision that the plan's values are rounded to, e.g. "bfloat16"."""
    if reference is None or actual is None or reference.shape != actual.shape or not reference.is_floating_point():
        return ""
    rounding = float((reference - actual).norm()) <= ROUNDING * float(reference.norm())
    return precision_of(actual) if rounding and not precision_of(reference) else ""


def near(a: float, b: float, limit: float = 1e-6) -> bool:
    """Return whether two numbers are equal up to rounding."""
    return abs(a - b) <= limit * max(abs(a), abs(b), 1e-300)
