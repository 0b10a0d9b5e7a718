"""Causes that one kind of state tells: a batch, what a step or a resume has left behind, what is no number."""

from __future__ import annotations

import math

import torch

from meshwise.equivalence.causes import CauseKind as K
from meshwise.equivalence.compare import MICROBATCHES
from meshwise.equivalence.evidence import Evidence, Rule, near, owner_of, says
from meshwise.equivalence.trace import Named, StepTrace, Trace
from meshwise.spec.words import some

# The contents of batches.


def _other_contents(evidence: Evidence) -> str:
    """Which sample is other numbers, and what reads it."""
    facts = evidence.first.facts
    where = f"{facts['place']}: " if facts["place"] else ""
    text = f"{where}sample {facts['sample']} of {facts['source']} is other numbers in {evidence.first.name}"
    return f"{text} than on one device ({facts['how many']} samples of microbatch {facts['microbatch']} are)."


def _own_generator(evidence: Evidence) -> str:
    draws = evidence.first.facts["draws"]
    if not draws:
        return ""
    return (
        f"{_other_contents(evidence)} {draws} draws in the order in which each rank reads. Make a generator of the "
        "sample's index, np.random.default_rng((seed, index)), or draw from torch, numpy.random or random, whose draws "
        "are keyed by epoch and index."
    )


def _made_of_the_batch(evidence: Evidence) -> str:
    """The first sample that is read differs too, before anything can have been drawn otherwise."""
    facts = evidence.first.facts
    if not facts["collate"] or not facts["from the first"] or evidence.first.step > 1:
        return ""
    return (
        f"{_other_contents(evidence)} {facts['collate']} makes a batch of the samples of one rank: what it makes "
        "of all of them (a mean, say) take in the loop, with mw.mean or mw.sum."
    )


CONTENTS_RULES: tuple[Rule, ...] = (
    says(K.CONTENTS, _own_generator),
    says(K.CONTENTS, _made_of_the_batch),
    says(K.CONTENTS, _other_contents),
)

# Statistics of a module's own.


def own_statistics(evidence: Evidence) -> str:
    """A module whose own buffers differ behind the step: it keeps something of the samples that it is given."""
    name, kind = evidence.first.name, evidence.first.facts["class"]
    kept = [d.name for d in evidence.faults("buffers") if owner_of(d.name) == name]
    if not kept:
        return ""
    return (
        f"{name or 'the model'} ({kind}) keeps {some(kept)}, which after the step is of the samples of one rank. Take "
        "what is of the whole batch with mw.mean(x.mean(0), weight=len(x), grad=True); torch's own batch norms are "
        "joined by themselves."
    )


# Values that are not finite.


def open_exchange(evidence: Evidence) -> str:
    """What was under way when a value became NaN, where exchanges were perturbed."""
    one, plan = evidence.steps
    if not math.isinf(evidence.first.relative) or not math.isfinite(one.loss) or not plan.nan_while_open:
        return ""
    return f"{plan.nan_while_open[0]}."


def not_finite(evidence: Evidence) -> str:
    """A number that one device has, and the plan has not."""
    one, plan = evidence.steps
    if not math.isfinite(one.loss) or math.isfinite(plan.loss) or "lacking" in evidence.first.facts:
        return ""
    if not math.isinf(evidence.first.relative):
        return ""
    where = evidence.first.name or "the model"
    losses = f"the loss is {plan.loss} there and {one.loss:.6g} on one device"
    return f"{where} is the first that is not finite under the plan; {losses}."


# A step that is left out, and what lies between steps.

WRITE_STEPS = "Let whether a step is made not depend on the number of devices, the rank or a number of one rank."
FIRST_MOMENTS = ("exp_avg", "momentum_buffer")


def skipped_step(evidence: Evidence) -> str:
    """Nothing moves in this step under the plan, and all of it does in others."""
    (one, plan), step = evidence.steps, evidence.first.step
    mine, theirs = (_values(trace) for trace in (evidence.reference, evidence.actual))
    moved = _moved(mine, step)
    if not moved or _moved(theirs, step) or not any(_moved(theirs, n) for n in range(1, len(theirs)) if n != step):
        return ""  # where none ever moves, the optimizer holds others
    gone = bool(one.clipped_gradients) and not plan.clipped_gradients
    why = "gradients are gone when optimizer.step() is called" if gone else "optimizer.step() changes nothing"
    return f"no parameter moves in step {step} under the plan: {why}. {WRITE_STEPS}"


def _values(trace: Trace) -> list[Named]:
    return [trace.initial_parameters, *(step.parameters for step in trace.steps)]


def _moved(values: list[Named], step: int) -> list[str]:
    before, after = values[step - 1], values[step]
    return [name for name, p in after.items() if name in before and not torch.equal(p, before[name])]


def other_microbatches(evidence: Evidence) -> str:
    """Of a step that has more microbatches, the first are those of one device: it was not made behind them."""
    counts = [evidence.first.facts.get(side) for side in ("one device", "the plan")]
    one, plan = (
        [sorted(index for part in micro for index in part) for micro in step.samples] for step in evidence.steps
    )
    if evidence.first.name != MICROBATCHES or plan[: len(one)] != one:
        return ""
    text = f"step {evidence.first.step} has {counts[1]} microbatches under the plan and {counts[0]} on one device"
    return f"{text}: optimizer.step() was left out behind the first {counts[0]}."


def accumulates_by_ranks(evidence: Evidence) -> str:
    """As many microbatches as on one device, divided or multiplied by the ranks."""
    one, plan = (evidence.first.facts.get(side) for side in ("one device", "the plan"))
    ranks = evidence.plan.devices
    if evidence.first.name != MICROBATCHES or ranks == 1 or plan not in (-(-one // ranks), one // ranks, one * ranks):
        return ""
    return (
        f"a step has {plan} microbatches on {ranks} devices, and {one} on one. Accumulate over as many for any number "
        "of devices: each takes its part of every batch."
    )


def fewer_steps(evidence: Evidence) -> str:
    """The plan has made other steps than one device."""
    one, plan = (evidence.first.facts[side] for side in ("one device", "the plan"))
    return f"one device makes {one} optimizer steps, the plan {plan}; those that both make are equal. {WRITE_STEPS}"


def changed_behind_step(evidence: Evidence) -> str:
    """Something has changed it under the plan alone, after the optimizer: a load, or the program's own hand."""
    one, plan = evidence.steps
    name = evidence.first.name
    if name not in plan.changed_behind or name in one.changed_behind:
        return ""
    return (
        f"{name} changes after optimizer.step() of step {evidence.first.step} and before the next batch, under the "
        "plan alone: what is loaded there, or written by hand, is not what was there."
    )


def began_anew(evidence: Evidence) -> str:
    """The optimizer's state is that of a first step, where one device goes on."""
    (one, plan), step = evidence.steps, evidence.first.step
    if step == 1:
        return ""
    fewer = [
        n
        for n, t in one.optimizer_state.items()
        if n.endswith(" step") and n in plan.optimizer_state and float(plan.optimizer_state[n]) < float(t)
    ]
    fresh = fewer or [n for n in one.optimizer_state if _is_first(plan, n) and not _is_first(one, n)]
    if not fresh:
        return ""
    moments = sorted({n.rpartition(" ")[2] for n in plan.optimizer_state} - {"step"})
    of = some(list(dict.fromkeys(n.rpartition(" ")[0] for n in fresh)))
    return (
        f"the optimizer's state of {of} ({some(moments)}) is that of a first step in step {step}, and goes on on one "
        "device: load_state_dict of the optimizer was left out, or a new one was made."
    )


def _is_first(step: StepTrace, name: str) -> bool:
    """Whether a moment is a multiple of the gradient of this step: nothing of earlier ones is in it."""
    parameter, _, key = name.rpartition(" ")
    gradient = step.clipped_gradients.get(parameter, step.gradients.get(parameter))
    state = step.optimizer_state.get(name)
    if key not in FIRST_MOMENTS or gradient is None or state is None or state.shape != gradient.shape:
        return False
    both = float((state * gradient).sum()) ** 2, float((state * state).sum()) * float((gradient * gradient).sum())
    return both[1] > 0 and near(*both, 1e-9)


def lost_by_a_resume(evidence: Evidence) -> str:
    """What a job saves and loads is not what it had."""
    lost = evidence.faults("resumed state")
    lacking = [d.name for d in lost if "lacking" in d.facts]
    if lacking:
        return f"there is no {some(lacking)} behind the resume that step {evidence.first.step} begins with."
    names = some([d.name for d in lost])
    return f"{names} differs from what was saved, behind the resume that step {evidence.first.step} begins with."
