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
from meshwise.checker.diagnose_by_hand import by_hand_in_the_backward, without_a_backward
from meshwise.checker.diagnose_weights import by_weights
from meshwise.checker.evidence import Evidence, Rule, is_inside, near, owner_of, precision_lost, says
from meshwise.spec.plan import Plan
from meshwise.spec.words import some


def _no_gradient(evidence: Evidence) -> Cause | None:
    """Explain a gradient that exists in the run on one device, but not in the run under the plan, or the other way
    round."""
    first = evidence.first
    lacking = first.facts.get("lacking")
    if lacking is None:
        return None
    names = [d.name for d in evidence.faults("gradients") if d.facts.get("lacking") == lacking]
    few = some(names)
    if lacking == "one device":
        return Cause(K.BACKWARD, f"{few}: there is a gradient under the plan, but none on one device.")
    if not _whole_modules(names, evidence):
        return Cause(K.BACKWARD, f"the plan has no gradient of {few}: frozen, detached or unused.")
    within = _common_module(names)
    order = [d.name for d in evidence.of_kind("gradients") if is_inside(d.name, within)]
    beyond = [name for name in order[order.index(first.name) :] if name not in names]
    if beyond and (evidence.plan.shard > 1 or evidence.plan.accumulate > 1):
        text = f"the plan has no gradient of {few}, but has one of {beyond[0]}, which comes before it"
        return Cause(K.MISSING_REDUCTION, f"{text}: the missing gradient was not reduced.")
    return Cause(K.BACKWARD, f"no gradient gets to {owner_of(first.name) or 'the model'}: the graph is cut after it.")


def _not_reduced(evidence: Evidence) -> str:
    names = [d.name for d in evidence.faults("gradients") if "ranks apart" in d.facts]
    return f"ranks have different values of {some(names)}, which should be equal." if names else ""


def _modified_between_backwards(evidence: Evidence) -> Cause | None:
    """Explain wrong gradients if the program has cleared, scaled or clipped gradients between the microbatches of a
    step. Return None if the program has not done so."""
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
            text = f"gradients are {'scaled' if alike else 'cut'} from norm {before:.3g} to {after:.3g} {where}"
            return Cause(K.CLIP_NORM, f"{text}, before the step: they are clipped in each microbatch.")
    return None


def _one_factor(evidence: Evidence) -> Cause | None:
    """Explain gradients that are all the same multiple of the gradients on one device. Return None if they are not."""
    factors, plan = [d.factor for d in evidence.faults("gradients")], evidence.plan
    factor = factors[0] if factors else None
    if factor is None or not all(f is not None and near(f, factor) for f in factors):
        return None
    text = f"{evidence.how_many()}, and are {factor:.12g} times those of one device"
    for size, words in {plan.devices: "ranks", plan.shard: "shards", plan.data: "replicas"}.items():
        if size > 1 and near(factor, size):
            return Cause(K.DOUBLED_REDUCTION, f"{text}, the number of {words}: summed, and not divided.")
        if size > 1 and near(factor, 1 / size):
            text += f", one over the number of {words}: divided once too often."
            return Cause(K.DOUBLED_REDUCTION, text)
    return Cause(K.LOSS_WEIGHTING, f"{text}: {_meaning(factor, plan)}.") if _all_wrong(evidence) else None


def _begins_with_a_factor(evidence: Evidence) -> str:
    """Return a sentence if the first wrong gradient is N or 1/N times the gradient on one device, where N is a number
    of ranks. Later gradients may be wrong in other ways, because the backward computes them from the first."""
    factor, plan = evidence.first.factor, evidence.plan
    sizes = {plan.devices, plan.data, plan.shard, plan.tensor, plan.context} - {1}
    if factor is None or not any(near(factor, size) or near(factor, 1 / size) for size in sizes):
        return ""
    return (
        f"{evidence.how_many()}; the first of the backward, of {evidence.first.name}, is {factor:.12g} times that of "
        "one device: equal gradients of the ranks are added up, or a sum is divided by the number of ranks."
    )


def _meaning(factor: float, plan: Plan) -> str:
    if plan.accumulate > 1 and any(near(factor, size) for size in (plan.accumulate, 1 / plan.accumulate)):
        return "the number of microbatches is applied once too often, or not at all"
    power = abs(math.log2(abs(factor)))
    scale = ", a power of two: perhaps a loss scale is not removed" if power >= 4 and near(power, round(power)) else ""
    return f"the same factor for each{scale}"


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
    """Return a sentence if a block under activation checkpointing draws other random numbers in its recomputation than
    in its forward pass, but only under the plan. Return "" otherwise."""
    reference, actual = evidence.steps
    if not actual.rng_mismatch or reference.rng_mismatch:
        return ""
    equal = f"module outputs{evidence.not_seen()} and loss are equal"
    return f"{equal}; in the backward a recomputed block draws other random numbers."


GRADIENT_RULES: tuple[Rule, ...] = (
    _no_gradient,
    by_hand_in_the_backward,
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


def _all_wrong(evidence: Evidence) -> bool:
    """Return whether every gradient above rounding noise is wrong."""
    return all(d.fault for d in evidence.gradients())


def _whole_modules(names: list[str], evidence: Evidence) -> bool:
    """Return True if, for each module, `names` contains all of its parameters or none."""
    owners = {owner_of(name) for name in names}
    return all(name in names for name in evidence.reference.steps[0].gradients if owner_of(name) in owners)


def _common_module(names: list[str]) -> str:
    """Return the name of the innermost module that contains the modules of all these parameters."""
    parts = [owner_of(owner_of(name)).split(".") for name in names]
    shared = takewhile(lambda level: len(set(level)) == 1, zip(*parts, strict=False))
    return ".".join(level[0] for level in shared)
