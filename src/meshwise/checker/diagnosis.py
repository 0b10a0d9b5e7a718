"""Diagnose the likely cause of the first difference.

The functions here are pure: they only look at what was compared.

A cause is named together with the evidence that supports it. It is likely, not proven.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from meshwise.checker import diagnose_by_hand as by_hand
from meshwise.checker import diagnose_kinds as kinds
from meshwise.checker import diagnose_updates as updates
from meshwise.checker.causes import Cause
from meshwise.checker.causes import CauseKind as K
from meshwise.checker.compare import MICROBATCHES, Comparison
from meshwise.checker.diagnose_gradients import GRADIENT_RULES
from meshwise.checker.diagnose_weights import by_numbers, by_weights, line_of, not_a_mean
from meshwise.checker.difference import LIMIT, Difference
from meshwise.checker.evidence import Evidence, Rule, is_inside, near, owner_of, says
from meshwise.checker.exchanges import places_of
from meshwise.checker.outputs import PARTS
from meshwise.checker.trace import Trace
from meshwise.spec.plan import Plan
from meshwise.spec.words import some

ranks_differ = Evidence.ranks_differ
OF_PROGRAM = (
    "at {name} all ranks of a run draw the same numbers, each for its own samples: the program has set a generator in "
    "the step, or draws after mw.split. Set generators before the loop; draw before mw.split, and split what is drawn."
)


def module_of(difference: Difference, comparison: Comparison) -> str:
    """Return the module of a difference. Return "" if it belongs to no single module."""
    if difference.kind in ("module outputs", "modules"):
        return difference.name
    if difference.kind in ("clipped gradients", "scheduler", "evaluation"):  # clipping covers all gradients at once
        return ""
    owner = owner_of(difference.name.split(" ")[0])
    return owner if owner in comparison.modules else ""


def cause_of(comparison: Comparison, reference: Trace, actual: Trace, plan: Plan) -> Cause | None:
    """Return the likely cause of the first difference, or None if nothing differs."""
    if comparison.first is None:
        return None
    evidence = Evidence(comparison.first, comparison, reference, actual, plan)
    rules = RULES[comparison.first.kind]
    causes = (rule(evidence) for rule in ((RACE, *rules) if comparison.first.step else rules))
    return next(cause for cause in causes if cause is not None)


def _is_of_a_norm(evidence: Evidence) -> bool:
    kind = evidence.comparison.modules.get(module_of(evidence.first, evidence.comparison), "")
    return "BatchNorm" in kind or "InstanceNorm" in kind


def _is_random(evidence: Evidence) -> bool:
    random = evidence.reference.random_modules | evidence.actual.random_modules
    return "Dropout" in evidence.first.facts["class"] or evidence.first.name in random


def _draws_of_ranks(evidence: Evidence) -> str:
    """Return a sentence if each rank draws numbers of its own in the first wrong module or before it."""
    first, at = evidence.first, evidence.first.name
    random = evidence.reference.random_modules | evidence.actual.random_modules
    own = "passed to" in first.facts  # then no child of the module drew
    parts = sorted(name for name in random if (name == at if own else is_inside(name, at)))
    unkeyed = sorted(evidence.reference.unkeyed | evidence.actual.unkeyed)
    if not unkeyed or not (parts or first.kind == "model inputs"):
        return ""
    where = f"in {some(parts)}, for rows that are not those of the samples" if parts else "before the first module"
    return f"ranks draw different numbers {where}: {some(unkeyed)}."


def _is_permuted(evidence: Evidence) -> bool:
    return any(name.startswith("randperm") for name in evidence.actual.unkeyed)


def _other_mode(evidence: Evidence) -> str:
    one, plan = (step.evaluating for step in evidence.steps)
    which = sorted(name for name in one ^ plan if is_inside(name, evidence.first.name))
    if not which:
        return ""
    side = "under the plan" if which[0] in plan else "on one device"
    return f"{some(which)}: in evaluation mode {side} during training, as after model.eval()."


def _reads_other_samples(evidence: Evidence) -> bool:
    """Return whether a step reads as many samples, each once, but not the same ones."""
    one, plan = ([index for ranks in step.samples for part in ranks for index in part] for step in evidence.steps)
    return len(one) == len(plan) == len(set(plan)) and set(one) != set(plan)


def _losses_of_ranks(evidence: Evidence) -> str:
    return f"ranks have different losses, which should all be that of the global batch.{_divided_by_hand(evidence)}"


def _divided_by_hand(evidence: Evidence) -> str:
    """Return a sentence that names the modules with different outputs on ranks that have the same samples."""
    unseen = (each for each in evidence.comparison.unseen if each.why == PARTS and each.step == evidence.first.step)
    names = some(dict.fromkeys(each.module or "the model" for each in unseen))
    return f" Ranks with the same samples have different outputs of {names}: is a sum missing in one?" if names else ""


def _couples_samples(evidence: Evidence) -> str:
    """Return a sentence if the loss cannot be computed separately for the samples of each rank."""
    if not evidence.of_kind("module outputs") or evidence.faults("module outputs"):
        return ""
    other = not_a_mean(evidence)
    return "" if other is None else f"{line_of(other)} is {other.shown}, not a mean over ranks.{evidence.or_padding()}"


def _ranks_have_parts(evidence: Evidence) -> str:
    """Return a sentence if ranks with the same samples, rank 0 among them, get other outputs than one device."""
    where = evidence.where(evidence.first.name)
    text = f"{where} returns different outputs on ranks that have the same samples: a sum lacks a part."
    return text if evidence.first.facts.get("first rank", 0.0) > LIMIT else ""


def _begins_in(evidence: Evidence) -> str:
    where, given = evidence.where(evidence.first.name), evidence.first.facts.get("passed to")
    return f"{where} is the first whose outputs differ" if given is None else f"{where} passes other values to {given}"


def _first_to_differ(evidence: Evidence) -> str:
    name, at = evidence.first.name, evidence.first.facts["at"]
    lines = places_of(evidence.exchanges(name))
    more = f" It exchanges by hand in {lines}." if lines else evidence.or_padding()
    more += _divided_by_hand(evidence)
    before = f"everything before it{evidence.not_seen(at)} is equal"
    return f"{_begins_in(evidence)}; {before}.{more}"


def _batch_by_ranks(evidence: Evidence) -> str:
    """Return a sentence if a batch, or a step's number of microbatches, grows or shrinks by the ranks."""
    first, devices = evidence.first, evidence.plan.devices
    one, plan = ([sum(map(len, ranks)) for ranks in step.samples] for step in evidence.steps)
    read = evidence.steps[1].samples[0]
    counts, several = list(map(len, read)), len({sample for part in read for sample in part})
    if first.name == MICROBATCHES:
        what, sizes, holds = "microbatches in a step", (len(one), len(plan)), first.step == 1
    else:  # if ranks read the same samples, the batch is not larger, so another rule has to explain the difference
        what, sizes = "samples in a batch", (one[0], plan[0])
        holds = max(counts) - min(counts) <= 1 and several == sum(counts)
    scaled = sizes[0] // devices, -(-sizes[0] // devices), sizes[0] * devices
    if devices == 1 or not holds or sizes[1] not in scaled:
        return ""
    text = f"the number of {what} is {sizes[1]} on {devices} devices, but {sizes[0]} on one device"
    return f"{text}. Use the same for any number of devices: each takes its part of every batch."


def _is_scheduled(evidence: Evidence) -> bool:
    return bool(evidence.steps[0].scheduler)


def _rate_by_ranks(evidence: Evidence) -> str:
    """Return a sentence if the number of ranks, or its root, scales the learning rate."""
    ranks = evidence.plan.devices
    scaled = {f"{ranks} times": ranks, f"the root of {ranks} times": math.sqrt(ranks)}
    scaled |= {} if _is_scheduled(evidence) else {f"1/{ranks}": 1 / ranks}
    rate, other = evidence.first.facts["one device"], evidence.first.facts["the plan"]
    text = next((text for text, factor in scaled.items() if near(other, rate * factor)), "")
    if not text or evidence.first.step > 1:
        return ""
    return f"the learning rate is {evidence.both_numbers()}: {text} as large."


def _rate_of_a_later_step(evidence: Evidence) -> str:
    for number, step in enumerate(evidence.reference.steps[evidence.first.step :], evidence.first.step + 1):
        if any(near(evidence.first.facts["the plan"], rate) for rate in step.learning_rates.values()):
            return f"the learning rate is {evidence.both_numbers()}, which one device has in step {number}."
    return ""


def _extra_ticks(evidence: Evidence) -> str:
    one, plan = (step.scheduler.get("last_epoch", math.nan) for step in evidence.steps)
    if not plan > one:
        return ""
    return f"after step {evidence.first.step} the scheduler has ticked {plan:g} times, on one device {one:g} times."


RACE = says(K.RACE, kinds.open_exchange)
START_RULES: tuple[Rule, ...] = (
    says(K.START_VALUES, "ranks have different values of {name} before the first step.", ranks_differ),
    says(K.START_VALUES, "{lacking} has no {name}.", lambda evidence: "lacking" in evidence.first.facts),
    says(K.START_VALUES, "{name} differs before the first step."),
)
RULES: Mapping[str, tuple[Rule, ...]] = {
    "races": (says(K.RACE, "{name}."),),
    "modules": (says(K.MODULE, "{name} has one class on some ranks and another on others."),),
    "tied weights": (
        says(K.TIED_WEIGHT, "{name} is one parameter on some ranks only.", ranks_differ),
        says(K.TIED_WEIGHT, "{name} is one parameter on the side of {tied} only."),
    ),
    "initial parameters": START_RULES,
    "initial buffers": START_RULES,
    "sample order": (
        says(K.BATCH_SIZE, _batch_by_ranks),
        says(K.SKIPPED, updates.other_microbatches),
        says(K.DATA_ORDER, "{name} has the same number of samples, but other ones: {samples}.", _reads_other_samples),
        says(K.PADDING, "{name}: {samples}.", Evidence.other_samples),
        says(K.DATA_ORDER, "{name} has the same samples in another order."),
    ),
    "resumed state": (says(K.RESUMED, updates.lost_by_a_resume),),
    "batch contents": (says(K.CONTENTS, kinds.other_contents),),
    "random draws": (says(K.DROPOUT, OF_PROGRAM),),
    "model inputs": (
        says(K.COUPLED, "the input of the model is mixed by a permutation of each rank's own samples.", _is_permuted),
        says(K.CONTENTS, _draws_of_ranks),
        says(K.CONTENTS, "the model gets other values, of a batch that is equal: see what the program makes of it."),
    ),
    "module outputs": (
        says(K.MODE, _other_mode),
        says(K.BATCH_NORM, "{name} is a {class}: its inputs are equal, its outputs are not.", _is_of_a_norm),
        says(K.BATCH_NORM, kinds.own_statistics),
        says(K.DROPOUT, _draws_of_ranks),
        says(K.DROPOUT, "{name} ({class}) draws random numbers; {before}.", _is_random),
        says(K.NOT_FINITE, kinds.not_finite),
        says(K.WRONG_GROUP, by_hand.over_another_group),
        says(K.MISSING_REDUCTION, _ranks_have_parts),
        says(K.MODULE, _first_to_differ),
    ),
    "loss": (
        says(K.NOT_FINITE, kinds.not_finite),
        says(K.LOSS, _losses_of_ranks, ranks_differ),
        by_numbers,
        by_weights,
        says(K.COUPLED, _couples_samples),
        says(K.LOSS, "the loss is {both}."),
    ),
    "gradients": GRADIENT_RULES,
    "clipped gradients": (
        says(K.SKIPPED, updates.skipped_step),
        says(K.CLIP_NORM, "gradients are equal before they are clipped, but not on all ranks after it.", ranks_differ),
        says(K.CLIP_NORM, "gradients are equal before they are clipped, but not after it{times}."),
    ),
    "learning rate": (
        says(K.SCHEDULER, "ranks have different learning rates of {name}.", ranks_differ, _is_scheduled),
        says(K.LEARNING_RATE, "ranks have different learning rates of {name}.", ranks_differ),
        says(K.SCALED_LEARNING_RATE, _rate_by_ranks),
        says(K.EXTRA_TICKS, _rate_of_a_later_step),
        says(K.EXTRA_TICKS, _extra_ticks),
        says(K.SCHEDULER, "the learning rate is {both}.", _is_scheduled),
        says(K.LEARNING_RATE, "the learning rate is {both}, and no scheduler is known."),
    ),
    "optimizer state": updates.UPDATE_RULES,
    "parameters": updates.UPDATE_RULES,
    "buffers": (
        says(K.RESUMED, updates.changed_by_a_load),
        says(K.BATCH_NORM, "{outputs}, but {name}, of a batch norm, is not.", _is_of_a_norm),
        says(K.BUFFER, "{outputs}, and parameters; ranks have different values of {name}.", ranks_differ),
        says(K.BUFFER, "{name} differs; {outputs}, and parameters."),
    ),
    "scheduler": (
        says(K.SCHEDULER, "ranks have different values of {name} after step {step}.", ranks_differ),
        says(K.EXTRA_TICKS, _extra_ticks),
        says(K.SCHEDULER, "{name} is {both} after step {step}."),
    ),
    "steps": (says(K.SKIPPED, updates.fewer_steps),),
    "evaluation": kinds.EVALUATION_RULES,
}
"""The rules for each kind of difference. The first that finds a cause is used."""
