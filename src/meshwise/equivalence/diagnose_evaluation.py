"""Diagnose differing evaluation metrics when parameters and buffers agree."""

from __future__ import annotations

import math

from meshwise.equivalence.causes import CauseKind as K
from meshwise.equivalence.evidence import Evidence, Rule, near, says

COUNTED = (
    "{name} is {both}: every rank has the value of all samples. Either the loop reads a DataLoader that was not passed "
    "to mw.distribute (write loader = mw.distribute(loader) before it), or mw.sum or mw.mean has returned the value."
)
UNSUMMED = "without mw.sum"
"""The label of an evaluation loop in a script that computes its metrics from the samples of one rank only."""


def _sample_counted_again(evidence: Evidence) -> str:
    """Return a sentence if one sample explains all wrong evaluation metrics. Either the sample was left out, or it was
    counted again by ranks that got it as padding. Return an empty string if no sample explains the metrics."""
    wrong = [d.name for d in evidence.faults("evaluation")]
    single = evidence.reference.single_sample_metrics
    if not wrong or any(name not in single or name not in evidence.reference.metric_sums for name in wrong):
        return ""
    for index in single[wrong[0]]:
        padding = evidence.actual.padding_ranks.get(index, 0)
        for times in (padding, -1) if padding else (-1,):
            if all(index in single[n] and _gives(evidence, n, index, times) for n in wrong):
                equal = f"parameters and buffers are equal; {evidence.first.name} is {evidence.both_numbers()}"
                counted = "were not counted" if times < 0 else f"counted {times + 1} times"
                return f"{equal}, as if sample {index} {counted}."
    return ""


def _gives(evidence: Evidence, name: str, index: int, times: int) -> bool:
    total, weights = evidence.reference.metric_sums[name]
    mean, weight = evidence.reference.single_sample_metrics[name][index]
    weight *= times
    changed = weights + weight
    return changed > 0 and near((total + mean * weight) / changed, evidence.actual.evaluation[name], 1e-9)


def _is_not_summed(evidence: Evidence) -> bool:
    return evidence.first.name.endswith(UNSUMMED)


def _is_random_under_the_plan(evidence: Evidence) -> bool:
    return evidence.actual.evaluation_draws > 0 and not evidence.reference.evaluation_draws


def _is_read_by_every_rank(evidence: Evidence) -> str:
    """Return a sentence about a value that every rank has of all samples, so that `mw.sum` counts each sample once per
    rank. Return an empty string if there is none."""
    one, plan = (evidence.first.facts.get(side, math.nan) for side in ("one device", "the plan"))
    again = near(plan, one * evidence.plan.devices) and evidence.first.name.startswith("mw.sum")
    return COUNTED.format(name=evidence.first.name, both=evidence.both_numbers()) if again else ""


EQUAL_BEFORE = "parameters and buffers are equal; {name} is {both}"
EVALUATION_RULES: tuple[Rule, ...] = (
    says(
        K.MISSING_SUM,
        "{name} had no mw.backward either, so each rank has the figure of its own samples.",
        _is_not_summed,
    ),
    says(K.UNDISTRIBUTED, _is_read_by_every_rank),
    says(K.PADDING, "{name}: {samples}.", Evidence.other_samples),
    says(
        K.EVALUATION,
        "ranks have different values of {name}, which should be that of all samples.",
        Evidence.ranks_differ,
    ),
    says(K.PADDING, _sample_counted_again),
    says(
        K.DROPOUT,
        f"{EQUAL_BEFORE}; the plan draws random numbers in the evaluation, one device does not.",
        _is_random_under_the_plan,
    ),
    says(K.EVALUATION, f"{EQUAL_BEFORE}."),
)
