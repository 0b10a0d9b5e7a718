"""From the first difference to its likely cause: pure functions over what was compared.

A cause is the one that the evidence speaks for, named with that evidence; it is likely, not proven.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from meshwise.equivalence.causes import Cause
from meshwise.equivalence.causes import CauseKind as K
from meshwise.equivalence.compare import Comparison, Difference
from meshwise.equivalence.diagnose_evaluation import EVALUATION_RULES
from meshwise.equivalence.diagnose_gradients import GRADIENT_RULES
from meshwise.equivalence.evidence import (
    ROUNDING,
    Evidence,
    Rule,
    both_numbers,
    first_few,
    gradient_factor,
    near,
    number_text,
    other_samples,
    parameters_before,
    precision_lost,
    ranks_differ,
    says,
)
from meshwise.equivalence.tolerance import precision_of
from meshwise.equivalence.trace import StepTrace, Trace
from meshwise.spec.plan import Plan

OWNED = {
    "tied weights",
    "initial parameters",
    "initial buffers",
    "gradients",
    "optimizer state",
    "parameters",
    "buffers",
}
"""Kinds whose differences belong to the module that owns the tensor. (Clipping is of all gradients at once.)"""


def module_of(difference: Difference, comparison: Comparison) -> str:
    """The module that a difference lies in: itself, or the owner of the parameter. Empty where there is none."""
    if difference.kind in ("module outputs", "modules"):
        return difference.name
    owner = difference.name.split(" ")[0].rpartition(".")[0]
    return owner if difference.kind in OWNED and owner in comparison.modules else ""


def cause_of(comparison: Comparison, reference: Trace, actual: Trace, plan: Plan) -> Cause | None:
    """The likely cause of the first difference; None when there is none. plan: the plan of `actual`."""
    first = comparison.first
    if first is None:
        return None
    evidence = Evidence(comparison, reference, actual, plan)
    causes = (rule(first, evidence) for rule in RULES[first.kind])
    return next(cause for cause in causes if cause is not None)


def _tied_on_one_side_only(first: Difference, evidence: Evidence) -> bool:
    return bool(evidence.faults("tied weights", 0))


def _is_norm(first: Difference, evidence: Evidence) -> bool:
    kind = evidence.class_of(first)
    return "BatchNorm" in kind or "InstanceNorm" in kind


def _is_random(first: Difference, evidence: Evidence) -> bool:
    return "Dropout" in evidence.class_of(first) or first.name in evidence.random_modules


def _contains_batch_norm(first: Difference, evidence: Evidence) -> bool:
    return any("BatchNorm" in evidence.comparison.modules.get(inner, "") for inner in evidence.inside(first.name))


def _random_before(first: Difference, evidence: Evidence) -> Cause | None:
    """The first module of a microbatch, where something draws random numbers that are not keyed."""
    outputs = evidence.of_kind("module outputs", first.step)
    begins = next(d for d in outputs if d.facts.get("microbatch") == first.facts.get("microbatch"))
    unkeyed = sorted(evidence.reference.unkeyed | evidence.actual.unkeyed)
    if not unkeyed or begins is not first:
        return None
    text = f"{first.name or 'the model'} is the first module; before it ranks draw different numbers"
    return Cause(K.DROPOUT, f"{text}: {first_few('operator', unkeyed)}.")


def _outputs_are_equal(first: Difference, evidence: Evidence) -> bool:
    compared = evidence.of_kind("module outputs", first.step)
    return bool(compared) and not any(d.fault for d in compared)


def _scaled_by_clipping(first: Difference, evidence: Evidence) -> Cause | None:
    factor = gradient_factor(first)
    text = f"gradients are equal before they are clipped, and after it {number_text(factor)} times those of one device."
    return None if factor is None else Cause(K.CLIP_NORM, text)


def _is_scheduled(first: Difference, evidence: Evidence) -> bool:
    return bool(evidence.step(first.step)[0].scheduler)


def _ranks_differ_and_are_scheduled(first: Difference, evidence: Evidence) -> bool:
    return ranks_differ(first, evidence) and _is_scheduled(first, evidence)


def _rate_times_ranks(first: Difference, evidence: Evidence) -> Cause | None:
    """The rule of linear scaling, or that of the root, although the batch is the same."""
    rate, other = _rates(first)
    ranks = evidence.plan.devices
    scaled = {ranks: str(ranks), math.sqrt(ranks): f"the root of {ranks}"}
    texts = [text for factor, text in scaled.items() if first.step == 1 and near(other, rate * factor)]
    if not texts:
        return None
    return Cause(K.SCALED_LEARNING_RATE, f"it is {both_numbers(first)}: {texts[0]} times as large.")


def _rates(first: Difference) -> tuple[float, float]:
    return float(first.facts.get("one device", math.nan)), float(first.facts.get("the plan", math.nan))


def _rate_of_a_later_step(first: Difference, evidence: Evidence) -> Cause | None:
    _, other = _rates(first)
    steps = enumerate(evidence.reference.steps[first.step :], first.step + 1)
    later = [number for number, step in steps if any(near(other, rate) for rate in step.learning_rates)]
    if not later:
        return None
    return Cause(
        K.EXTRA_TICKS,
        f"the learning rate is {both_numbers(first)}, which one device has in step {later[0]}.",
    )


def _is_rate_over_ranks(first: Difference, evidence: Evidence) -> bool:
    rate, other = _rates(first)
    return near(other, rate / evidence.plan.devices)


def _extra_ticks(first: Difference, evidence: Evidence) -> Cause | None:
    one, plan = (trace.scheduler.get("last_epoch", math.nan) for trace in evidence.step(first.step))
    if not plan > one:
        return None
    text = f"after step {first.step} the scheduler has ticked {plan:g} times, on one device {one:g} times."
    return Cause(K.EXTRA_TICKS, text)


def _kept_in_low_precision(first: Difference, evidence: Evidence) -> Cause | None:
    """Values that a lower precision can hold, on rank 0 or on any other, where those of one device are finer."""
    reference, actual = evidence.step(first.step)
    if first.kind == "optimizer state":
        name, key = first.name.rsplit(" ", 1)
        states = [step.optimizer_state.get(name, {}).get(key) for step in (reference, actual)]
        found = {first.name: precision_lost(*states)}
    else:
        found = _parameters_in_low_precision(first, evidence, reference, actual)
    name, dtype = next(((name, dtype) for name, dtype in found.items() if dtype), ("", ""))
    if not dtype:
        return None
    return Cause(K.MASTER_WEIGHTS, f"gradients are equal; every value of {name} is one that {dtype} can hold.")


def _parameters_in_low_precision(
    first: Difference, evidence: Evidence, reference: StepTrace, actual: StepTrace
) -> dict[str, str]:
    faults = evidence.faults("parameters", first.step)
    start, now = parameters_before(evidence.actual, first.step), actual.parameters
    moved = [d.name for d in faults if d.name in now and not torch.equal(now[d.name], start[d.name])]
    found = {name: precision_lost(reference.parameters.get(name), now[name]) for name in moved}
    on_others = [d.name for d in faults if d.facts.get("ranks apart", 1.0) <= ROUNDING and not found.get(d.name)]
    fine = [n for n in on_others if n in reference.parameters and not precision_of(reference.parameters[n])]
    return found | {name: actual.low_precision[name] for name in fine if name in actual.low_precision}


def _stale_optimizer(first: Difference, evidence: Evidence) -> Cause | None:
    reference, actual = evidence.step(first.step)
    theirs, mine = (parameters_before(trace, first.step) for trace in (evidence.actual, evidence.reference))
    moved = [n for n in reference.parameters if n in theirs and not torch.equal(reference.parameters[n], mine[n])]
    still = [n for n in moved if n in actual.parameters and torch.equal(actual.parameters[n], theirs[n])]
    unknown = [name for name in actual.optimizer_state if name.startswith("unknown_param")]
    lost = sorted(reference.optimizer_state.keys() - actual.optimizer_state.keys())
    if not (unknown or still or lost):
        return None
    parts = [f"{first_few('parameter', still)} did not move"] if still else []
    parts += [f"{first_few('tensor', unknown)} of the optimizer do not belong to the model"] if unknown else []
    parts += [f"it has no state of {first_few('parameter', lost)}"] if lost and not unknown else []
    return Cause(K.STALE_OPTIMIZER, f"gradients are equal; {'; '.join(parts)}.")


def _parameters_differ(first: Difference, evidence: Evidence) -> bool:
    return bool(evidence.faults("parameters", first.step))


def _belongs_to_batch_norm(first: Difference, evidence: Evidence) -> bool:
    return "BatchNorm" in evidence.comparison.modules.get(module_of(first, evidence.comparison), "")


START_RULES: tuple[Rule, ...] = (
    says(K.TIED_WEIGHT, "{name} differs, and tied weights are not tied on both sides.", _tied_on_one_side_only),
    says(K.START_VALUES, "ranks have different values of {name} before the first step.", ranks_differ),
    says(K.START_VALUES, "{lacking} has no {name}.", lambda first, evidence: "lacking" in first.facts),
    says(K.START_VALUES, "{name} differs before the first step."),
)
UPDATE_RULES: tuple[Rule, ...] = (
    _kept_in_low_precision,
    says(K.OPTIMIZER_STEP, "gradients are equal; ranks have different values of {name}.", ranks_differ),
    _stale_optimizer,
    says(K.OPTIMIZER_STEP, "gradients are equal, the optimizer update of {name} differs.", _parameters_differ),
    says(K.OPTIMIZER_STEP, "gradients and parameters are equal, the optimizer's {name} differs."),
)
RULES: Mapping[str, tuple[Rule, ...]] = {
    "modules": (says(K.MODULE, "{name} is of one class on some ranks, and of another on others."),),
    "tied weights": (
        says(K.TIED_WEIGHT, "{name} is one parameter on some ranks only.", ranks_differ),
        says(K.TIED_WEIGHT, "{name} is one parameter on the side of {tied} only."),
    ),
    "initial parameters": START_RULES,
    "initial buffers": START_RULES,
    "sample order": (
        says(K.PADDING, "{name}: {samples}.", other_samples),
        says(K.DATA_ORDER, "{name} has the same samples in another order."),
    ),
    "module outputs": (
        says(K.BATCH_NORM, "{name} is a {class}: its inputs are equal, its outputs are not.", _is_norm),
        says(K.DROPOUT, "{name} ({class}) draws random numbers; everything before it is equal.", _is_random),
        _random_before,
        says(K.BATCH_NORM, "{name} contains a batch norm, and nothing before it differs.", _contains_batch_norm),
        says(K.MODULE, "{name} ({class}) is the first whose outputs differ; everything before it is equal."),
    ),
    "loss": (
        says(K.LOSS, "ranks have different losses, which should all be that of the global batch.", ranks_differ),
        says(K.LOSS_WEIGHTING, "module outputs are equal, the loss is {both}.", _outputs_are_equal),
        says(K.LOSS, "the loss is {both}."),
    ),
    "gradients": GRADIENT_RULES,
    "gradient norm": GRADIENT_RULES,
    "clipped gradients": (
        says(
            K.CLIP_NORM, "gradients are equal before they are clipped; ranks have different ones after.", ranks_differ
        ),
        _scaled_by_clipping,
        says(K.CLIP_NORM, "gradients are equal before they are clipped, and not after."),
    ),
    "learning rate": (
        says(K.SCHEDULER, "ranks have different learning rates of {name}.", _ranks_differ_and_are_scheduled),
        says(K.LEARNING_RATE, "ranks have different learning rates of {name}.", ranks_differ),
        _rate_times_ranks,
        _rate_of_a_later_step,
        _extra_ticks,
        says(K.SCHEDULER, "the learning rate is {both}.", _is_scheduled),
        says(K.SCALED_LEARNING_RATE, "it is {both}: divided by the number of ranks.", _is_rate_over_ranks),
        says(K.LEARNING_RATE, "it is {both}, and no scheduler is known."),
    ),
    "optimizer state": UPDATE_RULES,
    "parameters": UPDATE_RULES,
    "buffers": (
        says(K.BATCH_NORM, "outputs are equal, but {name}, of a batch norm, is not.", _belongs_to_batch_norm),
        says(K.BUFFER, "outputs and parameters are equal; ranks have different values of {name}.", ranks_differ),
        says(K.BUFFER, "{name} differs, and outputs and parameters are equal."),
    ),
    "scheduler": (
        says(K.SCHEDULER, "ranks have different values of {name} after step {step}.", ranks_differ),
        _extra_ticks,
        says(K.SCHEDULER, "{name} is {both} after step {step}."),
    ),
    "evaluation": EVALUATION_RULES,
}
"""Kind of the first difference -> its rules, the surest first: the first that knows a cause names it."""
