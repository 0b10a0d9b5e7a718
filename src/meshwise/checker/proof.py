"""Prove whether a plan computes what one device computes.

The proof says where the two sides diverge, the likely cause, and each side's rounding errors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum

from meshwise.checker.causes import Cause
from meshwise.checker.compare import Comparison, compare
from meshwise.checker.diagnosis import cause_of, module_of
from meshwise.checker.difference import LIMIT
from meshwise.checker.finding import Finding
from meshwise.checker.noise import noise_of
from meshwise.checker.precision_warnings import NO_ROUNDING, OTHER, OTHER_RUN, kept_coarser, rounding_warnings, unproven
from meshwise.checker.printed_numbers import ALONE, printed_otherwise
from meshwise.checker.trace import CheckSpec, Trace
from meshwise.parallel.rng_notes import OF_DRAWS
from meshwise.parallel.tensor import UNDIVIDED
from meshwise.spec.plan import Plan

ROUNDED = ("loss", "gradients", "gradient norm", "parameters", "buffers", "evaluation")
"""The kinds of values for which a `Proof` lists rounding errors."""


class Verdict(Enum):
    """The verdict of a check. NOT_JUDGED means that all values compared in float64 are equal, but something was not
    compared, or differs otherwise, such as the size of rounding errors or a printed number."""

    EQUAL = "equal"
    NOT_JUDGED = "not judged"
    DIFFERENT = "different"


@dataclass(frozen=True)
class Rounding:
    """The rounding errors of one kind of value, e.g. of the gradients, if they are computed in the plan's precision. An
    error is the largest relative difference from the run on one device in float64."""

    kind: str
    one_device: float
    plan: float


@dataclass(frozen=True)
class Proof:
    """The result of `mw.check`: whether the plan computes what one device computes, and if not, where and why.

    job: the name of the job or the script.
    plan: the plan that was checked.
    devices: the devices that it ran on, e.g. "4xcpu".
    batches: the number of samples in each step.
    comparison: all comparisons. `comparison.first` is the first difference in the order of events, None if nothing
        differs.
    module: the module of the first difference. Empty if it is unknown.
    cause: the likely cause of the first difference. None if nothing differs.
    rounding: the rounding errors in the plan's own precision, on one device and under the plan. Empty if they were not
        asked for.
    notes: remarks on the plan, and what was not checked.
    not_judged: sentences on other values that differ, such as printed numbers, although all values compared in float64
        are equal.
    warnings: sentences on a plan that divides little of the work, and on likely mistakes that also affect one device.
    """

    job: str
    plan: Plan
    devices: str
    batches: tuple[int, ...]
    comparison: Comparison
    module: str
    cause: Cause | None
    rounding: tuple[Rounding, ...] = ()
    notes: tuple[str, ...] = ()
    not_judged: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()

    @property
    def verdict(self) -> Verdict:
        """The verdict, which decides the exit code."""
        return Verdict.DIFFERENT if not self.equal else Verdict.NOT_JUDGED if self.not_judged else Verdict.EQUAL

    @property
    def equal(self) -> bool:
        """Whether all values of the plan equal the values of one device, up to a relative difference of 1e-9."""
        return self.comparison.equal

    @property
    def findings(self) -> tuple[Finding, ...]:
        """The cause of the first difference, if any, in the form of a PlainProof."""
        return () if self.cause is None else (Finding(self.cause.name, True, (), self.cause.evidence),)


def prove(
    job: str,
    spec: CheckSpec,
    devices: str,
    reference: Trace,
    actual: Trace,
    rounded: Sequence[Trace] = (),
    again: Callable[[CheckSpec], Trace] | None = None,
) -> Proof:
    """Compare a run under a plan with a run on one device, and return the result."""
    divided = max(spec.plan.tensor, spec.plan.context, spec.plan.pipeline) > 1
    comparison = compare(reference, actual, divided=divided)
    first = comparison.first
    if first is not None and again is not None and (first.step > 1 or first.kind == "evaluation"):
        noise = noise_of(reference, actual)
        if noise:
            reference = again(replace(spec, noise=noise))
            comparison = compare(reference, actual, divided=divided)
            first = comparison.first
    of_rounded = [compare(reference, trace) for trace in rounded]
    unknown = NO_ROUNDING if len(rounded) < 2 else ""
    for d in (d for side in of_rounded for d in side.differences if d.kind in ("initial parameters", "steps")):
        unknown = OTHER_RUN if d.relative > OTHER else unknown
    rounded, of_rounded = ([], []) if unknown else (rounded, of_rounded)
    wrong, harmless = printed_otherwise(reference.shown, actual.shown, devices, rounded[0].shown if rounded else ())
    warnings = tuple(note for note in actual.notes if note.startswith(UNDIVIDED))
    alone = [f"{each} {ALONE}" for each in wrong]
    not_judged = (*unproven(reference), *alone, *rounding_warnings(of_rounded, spec.plan.dtypes))
    not_judged += tuple(kept_coarser(rounded))
    return Proof(
        job,
        spec.plan,
        devices,
        tuple(sum(len(part) for micro in step.samples for part in micro) for step in reference.steps),
        comparison,
        module_of(first, comparison) if first is not None else "",
        cause_of(comparison, reference, actual, spec.plan),
        tuple(_rounding(of_rounded)),
        (
            # Notes on random draws would be wrong, since a check derives dropout from keys.
            *(note for note in actual.notes if note not in OF_DRAWS and note not in warnings),
            *(harmless if comparison.equal else [*wrong, *harmless]),
            *([unknown] if unknown and spec.plan.precision != "fp64" else []),
        ),
        not_judged if comparison.equal else (),
        (*warnings, *reference.hints),
    )


def _rounding(rounded: Sequence[Comparison]) -> Iterator[Rounding]:
    """Yield the rounding errors of each kind of value."""
    if not rounded:
        return
    one, plan = ({c.kind: c.largest.relative for c in side.kinds} for side in rounded)
    for kind in ROUNDED:
        if kind in one and kind in plan:
            yield Rounding(kind, one[kind], plan[kind])


@dataclass(frozen=True)
class PlainProof:
    """The result of checking a script that does not use meshwise. It says whether the ranks compute the same as one
    process on the same samples. It also says whether each sample is read once, and whether the schedule fits the number
    of steps.

    steps: how many steps were compared.
    epochs: how many epochs the steps belong to.
    largest: the largest difference in a step that was compared, relative to the size of the tensor.
    findings: all that the check found.
    not_judged: sentences on what could not be judged.
    """

    script: str
    devices: str
    steps: int
    epochs: int
    largest: float
    findings: tuple[Finding, ...]
    not_judged: tuple[str, ...] = ()

    @property
    def verdict(self) -> Verdict:
        """The verdict: different if a finding is wrong or a value differs, else not judged if something was not."""
        if any(finding.wrong for finding in self.findings) or not self.largest <= LIMIT:
            return Verdict.DIFFERENT
        return Verdict.NOT_JUDGED if self.not_judged else Verdict.EQUAL

    @property
    def equal(self) -> bool:
        """Whether the script passes the check: no finding asks for a change, and everything could be judged."""
        return self.verdict is Verdict.EQUAL
