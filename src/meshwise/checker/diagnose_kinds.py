"""Diagnose causes from one kind of value alone.

These values are the contents of a batch, the buffers of a module, values that are not finite, and metrics.
"""

from __future__ import annotations

import math

from meshwise.checker.causes import CauseKind as K
from meshwise.checker.evidence import Evidence, Rule, near, owner_of, says
from meshwise.spec.words import some

# The contents of batches.


DRAW_BY_INDEX = "Draw from np.random.default_rng((seed, index)), or from torch or numpy, which are keyed by index."
COLLATE_EACH = "Compute what depends on all samples (for example a mean) in the loop, with mw.mean or mw.sum."


def other_contents(evidence: Evidence) -> str:
    """Return a sentence that names a sample whose values differ, and the line that reads it.

    The collate function is blamed if the very first sample differs, before random numbers could diverge.
    """
    facts = evidence.first.facts
    where = f"{facts['place']}: " if facts["place"] else ""
    text = f"{where}sample {facts['sample']} of {facts['source']} has other values in {evidence.first.name} than on one"
    text = f"{text} device ({facts['how many']} samples of microbatch {facts['microbatch']} do)."
    if facts["draws"]:
        return f"{text} {facts['draws']} draws in the order in which each rank reads. {DRAW_BY_INDEX}"
    if facts["collate"] and facts["from the first"] and evidence.first.step == 1:
        return f"{text} {facts['collate']} makes a batch of the samples of one rank. {COLLATE_EACH}"
    return text


# A module's own statistics.

OF_BATCH = "Compute statistics of the whole batch with mw.mean(x.mean(0), weight=len(x), grad=True)."


def own_statistics(evidence: Evidence) -> str:
    """Return a sentence if a module keeps statistics of this rank's samples only."""
    name, kind = evidence.first.name, evidence.first.facts["class"]
    kept = [d.name for d in evidence.faults("buffers") if owner_of(d.name) == name]
    text = f"{name or 'the model'} ({kind}) keeps {some(kept)}, which after the step covers the samples of one rank."
    return f"{text} {OF_BATCH}" if kept else ""


# Values that are not finite.


def open_exchange(evidence: Evidence) -> str:
    """Return a sentence if the program read a value before a collective had written it."""
    one, plan = evidence.steps
    if not math.isinf(evidence.first.relative) or not math.isfinite(one.loss) or not plan.nan_while_open:
        return ""
    return f"{plan.nan_while_open[0]}."


def not_finite(evidence: Evidence) -> str:
    """Return a sentence about a value that is finite on one device, but not under the plan."""
    (one, plan), first = evidence.steps, evidence.first
    is_new = math.isfinite(one.loss) and not math.isfinite(plan.loss) and math.isinf(first.relative)
    if not is_new or "lacking" in first.facts:
        return ""
    where = first.name or "the model"
    losses = f"the loss is {plan.loss} under the plan and {one.loss:.6g} on one device"
    return f"{where} is the first value that is not finite under the plan; {losses}."


COUNTED = "{name} is {both}: its loader was not passed to mw.distribute, or mw.sum or mw.mean has given it already."
UNSUMMED = "without mw.sum"
"""The label of an evaluation loop whose metrics cover the samples of one rank only."""
RATIO = "The mean of the ranks' ratios is not that of all: write mw.sum(a) / mw.sum(b), or mw.mean(a / b, weight=b)."


def _is_unsummed(evidence: Evidence) -> bool:
    return evidence.first.name.endswith(UNSUMMED)


def _is_of_a_sum(evidence: Evidence) -> bool:
    return evidence.first.name.startswith("mw.sum")


def _is_read_by_every_rank(evidence: Evidence) -> bool:
    """Return whether `mw.sum` counts each sample once per rank."""
    one, plan = (evidence.first.facts.get(side, math.nan) for side in ("one device", "the plan"))
    return near(plan, one * evidence.plan.devices) and _is_of_a_sum(evidence)


EVALUATION_RULES: tuple[Rule, ...] = (
    says(K.MISSING_SUM, "{name} had no mw.backward either: each rank has the figure of its own samples.", _is_unsummed),
    says(K.UNDISTRIBUTED, COUNTED, _is_read_by_every_rank),
    says(K.PADDING, "{name}: {samples}.", Evidence.other_samples),
    says(K.EVALUATION, "ranks have different values of {name}, which should be that of all.", Evidence.ranks_differ),
    says(K.EVALUATION, f"parameters and buffers are equal; {{name}} is {{both}}. {RATIO}", _is_of_a_sum),
    says(K.EVALUATION, "parameters and buffers are equal; {name} is {both}."),
)
