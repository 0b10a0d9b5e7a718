"""Diagnose differing gradients when outputs and loss agree.

The rules are in order, from the surest evidence to the weakest.

Much follows from the position of the first wrong gradient in the backward pass. Wrong loss weights or wrong reductions
make every gradient wrong, beginning at the loss. A fault inside a module leaves the gradients of later modules right.
"""

from __future__ import annotations

import math
from itertools import takewhile

from meshwise.checker.causes import Cause
from meshwise.checker.causes import CauseKind as K
from meshwise.checker.diagnose_by_hand import without_a_backward
from meshwise.checker.diagnose_weights import by_weights
from meshwise.checker.difference import largest
from meshwise.checker.evidence import Evidence, Rule, is_inside, near, owner_of, precision_lost, says
from meshwise.checker.noise import NOISE
from meshwise.spec.words import some


def _no_gradient(evidence: Evidence) -> Cause | None:
    """Explain a gradient that only one of the two runs has."""
    first, gradients = evidence.first, evidence.of_kind("gradients")
    lacking = first.facts.get("lacking")
    if lacking is None:
        return None
    names = [d.name for d in gradients if d.facts.get("lacking") == lacking]
    few, owners = some(names), {owner_of(name) for name in names}
    if lacking == "one device":
        return Cause(K.BACKWARD, f"{few}: there is a gradient under the plan, but none on one device.")
    if any(d.name not in names and owner_of(d.name) in owners for d in gradients):
        return Cause(K.BACKWARD, f"the plan has no gradient of {few}: frozen, detached or unused.")
    within, after = _common_module(names), gradients[gradients.index(first) :]
    beyond = [d.name for d in after if is_inside(d.name, within) and d.name not in names]
    if beyond and (evidence.plan.shard > 1 or evidence.plan.accumulate > 1):
        text = f"the plan has no gradient of {few}, but has one of {beyond[0]}, which comes before it"
        return Cause(K.MISSING_REDUCTION, f"{text}: the missing gradient was not reduced.")
    return Cause(K.BACKWARD, f"no gradient gets to {owner_of(first.name) or 'the model'}: the graph is cut after it.")


def _not_reduced(evidence: Evidence) -> str:
    names = [d.name for d in evidence.faults("gradients") if "ranks apart" in d.facts]
    return f"ranks have different values of {some(names)}, which should be equal." if names else ""


def _modified_between_backwards(evidence: Evidence) -> Cause | None:
    """Explain gradients that are cleared, scaled or clipped between the microbatches of a step."""
    one, plan = evidence.steps
    for rank, micro, before, after, alike in plan.modified_between_backwards:
        where = f"after microbatch {micro + 1} on rank {rank}"
        if after == 0:
            return Cause(K.MISSING_REDUCTION, f"gradients are thrown away {where}, before the step.")
        # If the program reads gradients, it reduces them, which changes their norm: use the norm on one device.
        if not alike and micro in one.standing:
            before, alike = one.standing[micro], True
        if near(before, after):
            continue
        if alike and (after > before or near(before / after, round(before / after))):
            text = f"gradients are multiplied by {after / before:.6g} {where}, and later ones are added to the result"
            return Cause(K.SCALED_BETWEEN, f"{text}: earlier microbatches get another weight than later ones.")
        if after < before:
            text = f"gradients are cut from norm {before:.3g} to {after:.3g} {where}"
            return Cause(K.CLIP_NORM, f"{text}, before the step: they are clipped in each microbatch.")
    return None


def _one_factor(evidence: Evidence) -> Cause | None:
    """Explain gradients that are all the same multiple of those on one device."""
    factor, plan, faults = evidence.first.factor, evidence.plan, evidence.faults("gradients")
    if factor is None or not all(near(d.factor or math.nan, factor) for d in faults):
        return None
    if times := evidence.of_ranks(factor):
        why = "summed, and not divided" if factor > 1 else "divided once too often"
        return Cause(K.DOUBLED_REDUCTION, f"{evidence.how_many()}, and are {times} those of one device: {why}.")
    wanted = evidence.steps[0].gradients
    right = [wanted[d.name] for d in evidence.of_kind("gradients") if not d.fault]
    if largest(right) > NOISE * largest(wanted.values()):
        return None
    meaning, power = "the same factor for each", abs(math.log2(abs(factor)))
    if plan.accumulate > 1 and any(near(factor, size) for size in (plan.accumulate, 1 / plan.accumulate)):
        meaning = "the number of microbatches is applied once too often, or not at all"
    elif power >= 4 and near(power, round(power)):
        meaning = "the same power of two for each: perhaps a loss scale is not removed"
    text = f"{evidence.how_many()}, and are {factor:.12g} times those of one device: {meaning}."
    return Cause(K.LOSS_WEIGHTING, text)


def _begins_with_a_factor(evidence: Evidence) -> str:
    """Return a sentence if the first wrong gradient is that of one device by a number of ranks."""
    times = evidence.of_ranks(evidence.first.factor or math.nan)
    text = f"{evidence.how_many()}; the first of the backward, of {evidence.first.name}, is {times} that of one device"
    why = "equal gradients are added up, or a sum is divided by the number of ranks"
    return f"{text}: {why}." if times else ""


def _only_tied_weights(evidence: Evidence) -> str:
    tied = {name: len(group) for group in evidence.reference.tied for name in group}
    name = evidence.first.name
    if name not in tied or any(d.name not in tied for d in evidence.faults("gradients")):
        return ""
    return f"{name} is shared by {tied[name]} modules, and its gradient differs."


def _lower_precision(evidence: Evidence) -> str:
    reference, actual = evidence.steps
    names = [d.name for d in evidence.faults("gradients")]
    found = {precision_lost(reference.gradients.get(n), actual.gradients.get(n)) for n in names}
    if not names or "" in found:
        return ""
    return f"every value of the {len(names)} gradients that differ fits into {' or '.join(sorted(found))}."


def _random_recompute(evidence: Evidence) -> str:
    """Return a sentence if a recomputed block draws other random numbers under the plan alone."""
    reference, actual = evidence.steps
    if not actual.rng_mismatch or reference.rng_mismatch:
        return ""
    equal = f"module outputs{evidence.not_seen()} and loss are equal"
    return f"{equal}; in the backward a recomputed block draws other random numbers."


GRADIENT_RULES: tuple[Rule, ...] = (
    _no_gradient,
    says(K.MISSING_REDUCTION, _not_reduced),
    _modified_between_backwards,
    says(K.DROPOUT, _random_recompute),
    _one_factor,
    by_weights,
    says(K.DOUBLED_REDUCTION, _begins_with_a_factor),
    says(K.TIED_WEIGHT, _only_tied_weights),
    says(K.LOWER_PRECISION, _lower_precision),
    without_a_backward,
    says(K.BACKWARD, "{how_many}; {name} was the first to be ready."),
)


def _common_module(names: list[str]) -> str:
    """Return the innermost module around the modules of these parameters."""
    parts = [owner_of(owner_of(name)).split(".") for name in names]
    shared = takewhile(lambda level: len(set(level)) == 1, zip(*parts, strict=False))
    return ".".join(level[0] for level in shared)
