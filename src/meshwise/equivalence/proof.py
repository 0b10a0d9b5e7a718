"""The proof: whether a plan computes what one device computes, where they part, the likely cause, and each rounding."""

from __future__ import annotations

from dataclasses import dataclass

from meshwise.equivalence.causes import Cause
from meshwise.equivalence.compare import Comparison, compare
from meshwise.equivalence.diagnosis import cause_of, module_of
from meshwise.equivalence.trace import CheckSpec, Trace
from meshwise.parallel.data import DROPOUT_NOTE
from meshwise.spec.plan import Plan

ROUNDED = ("loss", "gradients", "gradient norm", "parameters", "buffers", "evaluation")
"""Of what the rounding of each side is told."""


@dataclass(frozen=True)
class Rounding:
    """The largest relative difference of a kind from the float64 reference, in the plan's own dtypes."""

    kind: str
    one_device: float
    plan: float


@dataclass(frozen=True)
class Proof:
    """What a check found.

    batches: samples of each step. module: that of the first difference; empty where it has none.
    rounding: in the plan's own precision; empty where it was not asked for.
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

    @property
    def equal(self) -> bool:
        return self.comparison.equal


def prove(
    job: str, spec: CheckSpec, devices: str, one: Trace, plan: Trace, rounded: tuple[Trace, Trace] | None = None
) -> Proof:
    """Compare the sides. rounded: one device and the plan, in the plan's own precision."""
    comparison = compare(one, plan)
    first = comparison.first
    return Proof(
        job,
        spec.plan,
        devices,
        tuple(sum(len(part) for micro in step.samples for part in micro) for step in one.steps),
        comparison,
        module_of(first, comparison) if first is not None else "",
        cause_of(comparison, one, plan, spec.plan),
        () if rounded is None else _rounding(one, *rounded),
        notes_of(plan.notes),
    )


def notes_of(notes: tuple[str, ...]) -> tuple[str, ...]:
    """What a plan says of itself and a check does not do: dropout is keyed here."""
    return tuple(note for note in notes if note != DROPOUT_NOTE)


def _rounding(reference: Trace, one: Trace, plan: Trace) -> tuple[Rounding, ...]:
    sides = [{c.kind: c.largest for c in compare(reference, side).kinds} for side in (one, plan)]
    found = []
    for kind in ROUNDED:
        mine, other = (side.get(kind) for side in sides)
        if mine is not None and other is not None:
            found.append(Rounding(kind, mine.relative, other.relative))
    return tuple(found)
