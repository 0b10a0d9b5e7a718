"""Diagnose differing updates when gradients agree.

The causes are a skipped step, state that a resume lost, and a wrong update.
"""

from __future__ import annotations

import torch

from meshwise.checker.causes import CauseKind as K
from meshwise.checker.compare import MICROBATCHES, multiple
from meshwise.checker.difference import precision_of
from meshwise.checker.evidence import ROUNDING, Evidence, Rule, precision_lost, says
from meshwise.checker.trace import Named, StepTrace, Trace
from meshwise.spec.words import some

WRITE_STEPS = "Let whether a step is made not depend on the number of devices, the rank or a number of one rank."
FIRST_MOMENTS = ("exp_avg", "momentum_buffer")


def skipped_step(evidence: Evidence) -> str:
    """Return a sentence if a step changes parameters on one device, and none under the plan."""
    (one, plan), step = evidence.steps, evidence.first.step
    moved = any(_moved(evidence.actual, n) for n in range(1, len(evidence.actual.steps) + 1) if n != step)
    if not _moved(evidence.reference, step) or _moved(evidence.actual, step) or not moved:
        return ""  # if no step moves a parameter, the optimizer holds other parameters
    gone = bool(one.clipped_gradients) and not plan.clipped_gradients
    why = "gradients are gone when optimizer.step() is called" if gone else "optimizer.step() changes nothing"
    return f"no parameter moves in step {step} under the plan: {why}. {WRITE_STEPS}"


def _moved(trace: Trace, step: int) -> list[str]:
    """Return the parameters that change in a step."""
    before, after = _parameters_before(trace, step), trace.steps[step - 1].parameters
    return [name for name, p in after.items() if name in before and not torch.equal(p, before[name])]


def _parameters_before(trace: Trace, step: int) -> Named:
    """Return the parameters of a run as they were at the beginning of a step."""
    return trace.initial_parameters if step == 1 else trace.steps[step - 2].parameters


def other_microbatches(evidence: Evidence) -> str:
    """Return a sentence if the program seems to have skipped an optimizer.step() under the plan."""
    counts = [evidence.first.facts.get(side) for side in ("one device", "the plan")]
    one, plan = (
        [sorted(index for part in micro for index in part) for micro in step.samples] for step in evidence.steps
    )
    if evidence.first.name != MICROBATCHES or plan[: len(one)] != one:
        return ""
    text = f"step {evidence.first.step} has {counts[1]} microbatches under the plan and {counts[0]} on one device"
    return f"{text}: optimizer.step() was skipped after the first {counts[0]}."


def fewer_steps(evidence: Evidence) -> str:
    """Return a sentence that says how many optimizer steps each side made."""
    one, plan = (evidence.first.facts[side] for side in ("one device", "the plan"))
    return f"one device makes {one} optimizer steps, the plan {plan}; those that both make are equal. {WRITE_STEPS}"


def changed_by_a_load(evidence: Evidence) -> str:
    """Return a sentence if the first wrong value changes when the plan loads a state dict."""
    text = changed_behind_step(evidence)
    return f"{text} The model loads a state dict with other values there." if text and evidence.steps[1].loaded else ""


def changed_behind_step(evidence: Evidence) -> str:
    """Return a sentence if the first wrong value changes behind the step under the plan alone."""
    (one, plan), name = evidence.steps, evidence.first.name
    if name not in plan.changed_behind or name in one.changed_behind:
        return ""
    step = evidence.first.step
    return f"{name} changes between optimizer.step() of step {step} and the next batch, under the plan alone."


def began_anew(evidence: Evidence) -> str:
    """Return a sentence if the optimizer's state is reset under the plan alone."""
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
    of = some(dict.fromkeys(n.rpartition(" ")[0] for n in fresh))
    text = f"the optimizer's state of {of} ({some(moments)}) is reset in step {step}, but continues on one device"
    return f"{text}: optimizer.load_state_dict was not called, or a new optimizer was made."


def _is_first(step: StepTrace, name: str) -> bool:
    """Return whether a first moment begins in this step, as a multiple of the gradient."""
    parameter, _, key = name.rpartition(" ")
    gradient = step.clipped_gradients.get(parameter, step.gradients.get(parameter))
    state = step.optimizer_state.get(name)
    if key not in FIRST_MOMENTS or gradient is None or state is None or state.shape != gradient.shape:
        return False
    return bool(gradient.any()) and multiple(gradient, state)["rest"] <= 1e-8


def lost_by_a_resume(evidence: Evidence) -> str:
    """Return a sentence that names the state that a resume loses or changes."""
    lost = evidence.faults("resumed state")
    lacking = [d.name for d in lost if "lacking" in d.facts]
    what = f"there is no {some(lacking)}" if lacking else f"{some(d.name for d in lost)} differs from what was saved,"
    return f"{what} after the resume that step {evidence.first.step} begins with."


def _kept_in_low_precision(evidence: Evidence) -> str:
    """Return a sentence if the plan alone rounds a parameter or an optimizer state."""
    name = evidence.first.name
    if evidence.first.kind == "optimizer state":
        found = {name: precision_lost(*(step.optimizer_state.get(name) for step in evidence.steps))}
    else:
        found = _parameters_in_low_precision(evidence)
    lower = next((name for name, dtype in found.items() if dtype), None)
    return "" if lower is None else f"gradients are equal; every value of {lower} fits into {found[lower]}."


def _parameters_in_low_precision(evidence: Evidence) -> dict[str, str]:
    faults, (reference, actual) = evidence.faults("parameters"), evidence.steps
    moved = _moved(evidence.actual, evidence.first.step)
    wrong = [d.name for d in faults if d.name in moved]
    found = {name: precision_lost(reference.parameters.get(name), actual.parameters[name]) for name in wrong}
    on_others = [d.name for d in faults if d.facts.get("ranks apart", 1.0) <= ROUNDING and not found.get(d.name)]
    began = evidence.actual.initial_parameters  # a rank that never changes such a value keeps it as well
    fine = [n for n in on_others if not any(map(precision_of, (reference.parameters[n], began[n])))]
    return found | {name: actual.low_precision[name] for name in fine if name in actual.low_precision}


def _stale_optimizer(evidence: Evidence) -> str:
    actual, step = evidence.actual, evidence.first.step
    still = [
        n
        for n in _moved(evidence.reference, step)
        if n in evidence.steps[1].parameters and n not in _moved(actual, step)
    ]
    wanted, held = (dict.fromkeys(n.rpartition(" ")[0] for n in step.optimizer_state) for step in evidence.steps)
    unknown = [name for name in held if name.startswith("unknown_param")]
    lost = sorted(wanted.keys() - held.keys())
    parts = [f"{some(still)} did not move"] if still else []
    parts += [f"{some(unknown)} of the optimizer do not belong to the model"] if unknown else []
    parts += [f"the optimizer has no state of {some(lost)}"] if lost and not unknown else []
    return f"gradients are equal; {'; '.join(parts)}." if parts else ""


UPDATE_RULES: tuple[Rule, ...] = (
    says(K.SKIPPED, skipped_step),
    says(K.RESUMED, changed_by_a_load),
    says(K.OPTIMIZER_STEP, changed_behind_step),
    says(K.RESUMED, began_anew),
    says(K.MASTER_WEIGHTS, _kept_in_low_precision),
    says(K.OPTIMIZER_STEP, "gradients are equal; ranks have different values of {name}.", Evidence.ranks_differ),
    says(K.STALE_OPTIMIZER, _stale_optimizer),
    says(
        K.OPTIMIZER_STEP,
        "gradients are equal, the optimizer update of {name} differs.",
        lambda e: bool(e.faults("parameters")),
    ),
    says(K.OPTIMIZER_STEP, "gradients and parameters are equal, the optimizer's {name} differs."),
)
