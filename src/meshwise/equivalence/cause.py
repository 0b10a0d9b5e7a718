"""From the first difference to its likely cause: pure functions over what was compared.

A cause is the one that the evidence speaks for, said with that evidence; it is a likely one, not a proof.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from meshwise.equivalence.cause_of_evaluation import UNSUMMED, evaluated
from meshwise.equivalence.cause_of_gradients import gradient
from meshwise.equivalence.compare import Comparison, Difference
from meshwise.equivalence.evidence import (
    ROUNDING,
    Cause,
    Evidence,
    before,
    made_coarse,
    near,
    number,
    pair,
    repeated_text,
    scaled,
    some,
)
from meshwise.equivalence.seen import Side, Step
from meshwise.equivalence.sizes import rounded_to
from meshwise.spec.plan import Plan

__all__ = ["CAUSES", "UNSUMMED", "Cause", "cause_of", "module_of"]

CAUSES = {
    "loss weighting": "the mean over the global batch is not weighted by what each rank's mean is over",
    "missing reduction": "gradients of some ranks or microbatches are not in the sum",
    "doubled reduction": "gradients are summed or divided by the number of ranks once too often, or not divided",
    "batch-norm statistics": "a normalisation takes the statistics of one rank's share, not of the global microbatch",
    "dropout masks": "other random numbers are drawn than on one device, or than in the first run of a block",
    "padded or repeated sample": "a sample counts twice, or not at all",
    "data order": "a step reads other samples, or in another order",
    "clip norm": "gradients are clipped to another norm, or not once before the step",
    "master weights": "parameters or the optimizer's state are kept in a lower precision between steps",
    "lower precision": "gradients are computed or reduced in a lower precision",
    "tied weight": "a parameter that two modules share is not shared on both sides",
    "optimizer bound to old parameters": "the optimizer steps on other parameters than the model's",
    "scheduler ticks twice": "the scheduler takes more ticks than there are steps",
    "scheduler": "the scheduler does not take one tick a step",
    "learning rate times devices": "the learning rate depends on the number of devices, and the batch is global",
    "learning rate": "the optimizer steps with another learning rate",
    "start values": "the model starts from other values",
    "buffer": "a buffer is updated on one side only, or by each rank by itself",
    "module": "a module gives another output for the same input",
    "loss": "the loss itself is another for the same outputs",
    "backward": "the backward of a module gives another gradient for the same forward",
    "optimizer step": "the optimizer makes another step of the same gradients",
    "evaluation": "the metrics are other ones for the same parameters and samples",
    "evaluation without mw.sum": "what a loop counts is of each rank's own share alone",
}
"""Every cause that can be named, and what it means."""

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


def cause_of(comparison: Comparison, one: Side, plan: Side, made: Plan) -> Cause | None:
    """The likely cause of the first difference; None when there is none. made: the plan that was carried out."""
    first = comparison.first
    if first is None:
        return None
    return _RULES[first.kind](first, Evidence(comparison, one, plan, made))


def _tied(first: Difference, seen: Evidence) -> Cause:
    if "ranks apart" in first.facts:
        return Cause("tied weight", f"{first.name} is one parameter on some ranks alone.")
    return Cause("tied weight", f"{first.name} is one parameter on the side of {first.facts.get('tied')} alone.")


def _initial(first: Difference, seen: Evidence) -> Cause:
    if seen.faults("tied weights", 0):
        return Cause("tied weight", f"{first.name} is another one, and tied weights are not tied on both sides.")
    lacking = first.facts.get("lacking")
    if "ranks apart" in first.facts:
        return Cause("start values", f"ranks have each their own {first.name} before the first step.")
    more = f"{lacking} has no {first.name}." if lacking else f"{first.name} is another one before the first step."
    return Cause("start values", more)


def _modules(first: Difference, seen: Evidence) -> Cause:
    return Cause("module", f"{first.name or 'the model'} is of one class on some ranks, and of another on others.")


def _samples(first: Difference, seen: Evidence) -> Cause:
    if first.facts.get("repeated") or first.facts.get("missing"):
        return Cause("padded or repeated sample", repeated_text(first.name, first))
    return Cause("data order", f"{first.name} has the same samples in another order.")


def _output(first: Difference, seen: Evidence) -> Cause:
    kind = str(first.facts.get("class", ""))
    name = first.name or "the model"
    if "BatchNorm" in kind or "InstanceNorm" in kind:
        return Cause("batch-norm statistics", f"{name} is a {kind}: its inputs are equal, its outputs are not.")
    if "Dropout" in kind or first.name in seen.drawing:
        return Cause("dropout masks", f"{name} ({kind}) draws random numbers; all before it is equal.")
    unkeyed = seen.one.unkeyed | seen.plan.unkeyed
    if unkeyed and _begins(first, seen):
        draws = some("operator", sorted(unkeyed))
        return Cause(
            "dropout masks", f"{name} ({kind}) is the first module; ranks draw on their own before it: {draws}."
        )
    if any("BatchNorm" in seen.comparison.modules.get(inner, "") for inner in seen.below(first.name)):
        return Cause("batch-norm statistics", f"{name} holds a batch norm, and nothing before it differs.")
    return Cause("module", f"{name} ({kind}) is the first whose outputs differ; what went before is equal.")


def _begins(first: Difference, seen: Evidence) -> bool:
    """Whether no module of this microbatch was called before it."""
    micro = first.facts.get("microbatch")
    return next(d for d in seen.of_kind("module outputs", first.step) if d.facts.get("microbatch") == micro) is first


def _loss(first: Difference, seen: Evidence) -> Cause:
    if "ranks apart" in first.facts:
        return Cause("loss", "ranks have each their own loss, which should be that of the global batch.")
    if seen.count("module outputs", first.step) and not seen.faults("module outputs", first.step):
        return Cause("loss weighting", f"module outputs are equal, the loss is {pair(first)}.")
    return Cause("loss", f"the loss is {pair(first)}.")


def _clipped(first: Difference, seen: Evidence) -> Cause:
    if "ranks apart" in first.facts:
        return Cause("clip norm", "gradients are equal before they are clipped, and ranks have each their own after.")
    factor = scaled(first)
    more = "" if factor is None else f": they are {number(factor)} times those of one device"
    return Cause("clip norm", f"gradients are equal before they are clipped, and not after{more}.")


def _rate(first: Difference, seen: Evidence) -> Cause:
    if "ranks apart" in first.facts:
        name = "scheduler" if seen.step(first.step)[0].scheduler else "learning rate"
        return Cause(name, f"ranks have each their own learning rate of {first.name}.")
    mine = seen.one.steps
    rate, other = (float(first.facts.get(side, math.nan)) for side in ("one device", "the plan"))
    for factor, words in ((seen.ranks, str(seen.ranks)), (math.sqrt(seen.ranks), f"the root of {seen.ranks}")):
        if first.step == 1 and near(other, rate * factor):
            return Cause("learning rate times devices", f"it is {pair(first)}: {words} times as large.")
    later = [n for n, step in enumerate(mine, 1) if n > first.step and any(near(other, rate) for rate in step.rates)]
    if later:
        return Cause(
            "scheduler ticks twice", f"the learning rate is {pair(first)}, which one device has in step {later[0]}."
        )
    if not seen.step(first.step)[0].scheduler:
        if near(other, rate / seen.ranks):
            return Cause("learning rate times devices", f"it is {pair(first)}: one over {seen.ranks} of it.")
        return Cause("learning rate", f"it is {pair(first)}, and no scheduler is known.")
    return _ticks(first, seen) or Cause("scheduler", f"the learning rate is {pair(first)}.")


def _scheduler(first: Difference, seen: Evidence) -> Cause:
    if "ranks apart" in first.facts:
        return Cause("scheduler", f"ranks have each their own {first.name} after step {first.step}.")
    return _ticks(first, seen) or Cause("scheduler", f"{first.name} is {pair(first)} after step {first.step}.")


def _ticks(first: Difference, seen: Evidence) -> Cause | None:
    ticks = [side.scheduler.get("last_epoch", math.nan) for side in seen.step(first.step)]
    if not ticks[1] > ticks[0]:
        return None
    text = f"after step {first.step} the scheduler has ticked {ticks[1]:g} times, on one device {ticks[0]:g} times."
    return Cause("scheduler ticks twice", text)


def _stepped(first: Difference, seen: Evidence) -> Cause:
    """Optimizer state or parameters differ, and the gradients do not."""
    one, plan = seen.step(first.step)
    coarse = _kept_coarse(first, seen)
    if coarse is not None:
        return coarse
    name = first.name.split(" ")[0]
    if "ranks apart" in first.facts:
        return Cause("optimizer step", f"gradients are equal; ranks have each their own value of {first.name}.")
    theirs, mine = before(seen.plan, first.step), before(seen.one, first.step)
    moved = [n for n in one.parameters if n in theirs and not torch.equal(one.parameters[n], mine[n])]
    still = [n for n in moved if n in plan.parameters and torch.equal(plan.parameters[n], theirs[n])]
    strangers = [name for name in plan.optimizer if name.startswith("stranger")]
    lost = sorted(one.optimizer.keys() - plan.optimizer.keys())
    if strangers or still or lost:
        parts = [f"{some('parameter', still)} did not move"] if still else []
        parts += [f"{some('tensor', strangers)} of the optimizer are not the model's"] if strangers else []
        parts += [f"it holds no state of {some('parameter', lost)}"] if lost and not strangers else []
        return Cause("optimizer bound to old parameters", f"gradients are equal; {'; '.join(parts)}.")
    changed = seen.faults("parameters", first.step)
    also = f"{len(changed)} parameters differ after the step" if changed else "parameters are equal after the step"
    return Cause("optimizer step", f"gradients are equal, {name} is stepped otherwise; {also}.")


def _kept_coarse(first: Difference, seen: Evidence) -> Cause | None:
    """Values that a lower precision can hold, on rank 0 or on any other, where those of one device are finer."""
    one, plan = seen.step(first.step)
    if first.kind == "optimizer state":
        name, key = first.name.rsplit(" ", 1)
        coarse = made_coarse(one.optimizer.get(name, {}).get(key), plan.optimizer.get(name, {}).get(key))
        found = {first.name: coarse} if coarse else {}
    else:
        faults = seen.faults("parameters", first.step)
        names = [d.name for d in faults]
        start = before(seen.plan, first.step)
        moved = [n for n in names if n in plan.parameters and not torch.equal(plan.parameters[n], start[n])]
        here = {n: made_coarse(one.parameters.get(n), plan.parameters[n]) for n in moved}
        found = {n: dtype for n, dtype in here.items() if dtype}
        others = [d.name for d in faults if d.facts.get("ranks apart", 1.0) <= ROUNDING and _fine(one, d.name)]
        found |= {n: plan.coarse[n] for n in others if n in plan.coarse and n not in found}
    if not found:
        return None
    name, dtype = next(iter(found.items()))
    return Cause("master weights", f"gradients are equal; every value of {name} is one that {dtype} can hold.")


def _fine(one: Step, name: str) -> bool:
    return name in one.parameters and not rounded_to(one.parameters[name])


def _buffer(first: Difference, seen: Evidence) -> Cause:
    owner = module_of(first, seen.comparison)
    kind = seen.comparison.modules.get(owner, "")
    if "BatchNorm" in kind:
        return Cause("batch-norm statistics", f"outputs are equal, but {first.name} of {kind} is not.")
    ranks = "; ranks have each their own value of it" if "ranks apart" in first.facts else ""
    return Cause("buffer", f"{first.name} differs, and outputs and parameters are equal{ranks}.")


_RULES: dict[str, Callable[[Difference, Evidence], Cause]] = {
    "modules": _modules,
    "tied weights": _tied,
    "initial parameters": _initial,
    "initial buffers": _initial,
    "sample order": _samples,
    "module outputs": _output,
    "loss": _loss,
    "gradients": gradient,
    "gradient norm": gradient,
    "clipped gradients": _clipped,
    "learning rate": _rate,
    "optimizer state": _stepped,
    "parameters": _stepped,
    "buffers": _buffer,
    "scheduler": _scheduler,
    "evaluation": evaluated,
}
