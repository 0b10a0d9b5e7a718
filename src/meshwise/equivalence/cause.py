"""From the first difference to its likely cause: pure functions over what was compared.

A cause is the one that the evidence speaks for, said with that evidence; it is a likely one, not a proof.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from meshwise.equivalence.compare import Comparison, Difference
from meshwise.equivalence.seen import Side, Step
from meshwise.equivalence.sizes import LIMIT

CAUSES = {
    "loss weighting": "the mean over the global batch is not weighted by what each rank's mean is over",
    "missing reduction": "gradients are not added up over the ranks, or divided once too often",
    "doubled reduction": "gradients are added up once too often, or not divided by the number of ranks",
    "batch-norm statistics": "a normalisation takes the statistics of one rank's share, not of the global microbatch",
    "dropout masks": "ranks draw other random numbers than one device",
    "padded or repeated sample": "a sample counts twice, or not at all",
    "data order": "a step reads other samples, or in another order",
    "clip norm": "gradients are clipped to another norm",
    "master weights": "parameters or the optimizer's state are kept in a lower precision between steps",
    "tied weight": "a parameter that two modules share is not shared on both sides",
    "optimizer bound to old parameters": "the optimizer steps on other parameters than the model's",
    "scheduler ticks twice": "the scheduler takes more ticks than there are steps",
    "scheduler": "the scheduler does not take one tick a step",
    "learning rate times devices": "the learning rate depends on the number of devices, and the batch is global",
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


UNSUMMED = "without mw.sum"
"""How a loop of a script is called whose figures are of one rank alone."""

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


@dataclass(frozen=True)
class Cause:
    """A cause of `CAUSES`, and the evidence for it, one sentence."""

    name: str
    evidence: str


def module_of(difference: Difference, comparison: Comparison) -> str:
    """The module that a difference lies in: itself, or the owner of the parameter. Empty where there is none."""
    if difference.kind == "module outputs":
        return difference.name
    owner = difference.name.split(" ")[0].rpartition(".")[0]
    return owner if difference.kind in OWNED and owner in comparison.modules else ""


def cause_of(comparison: Comparison, one: Side, plan: Side, ranks: int) -> Cause | None:
    """The likely cause of the first difference; None when there is none."""
    first = comparison.first
    if first is None:
        return None
    return _RULES[first.kind](first, _Evidence(comparison, one, plan, ranks))


@dataclass(frozen=True)
class _Evidence:
    comparison: Comparison
    one: Side
    plan: Side
    ranks: int

    def faults(self, kind: str, step: int) -> list[Difference]:
        return [d for d in self.comparison.differences if d.kind == kind and d.step == step and d.fault]

    def count(self, kind: str, step: int) -> int:
        return sum(d.kind == kind and d.step == step for d in self.comparison.differences)

    def step(self, number: int) -> tuple[Step, Step]:
        return self.one.steps[number - 1], self.plan.steps[number - 1]


def _tied(first: Difference, seen: _Evidence) -> Cause:
    return Cause("tied weight", f"{first.name} is one parameter on the side of {first.facts.get('tied')} alone.")


def _initial(first: Difference, seen: _Evidence) -> Cause:
    if seen.faults("tied weights", 0):
        return Cause("tied weight", f"{first.name} is another one, and tied weights are not tied on both sides.")
    lacking = first.facts.get("lacking")
    if "ranks apart" in first.facts:
        return Cause("start values", f"ranks have each their own {first.name} before the first step.")
    more = f"{lacking} has no {first.name}." if lacking else f"{first.name} is another one before the first step."
    return Cause("start values", more)


def _samples(first: Difference, seen: _Evidence) -> Cause:
    repeated, missing = first.facts.get("repeated", []), first.facts.get("missing", [])
    if repeated or missing:
        return Cause(
            "padded or repeated sample",
            f"{first.name}: {_some('sample', repeated)} too often, {_some('sample', missing)} not at all.",
        )
    return Cause("data order", f"{first.name} has the same samples in another order.")


def _output(first: Difference, seen: _Evidence) -> Cause:
    kind = str(first.facts.get("class", ""))
    inside = [seen.comparison.modules.get(name, "") for name in _below(first.name, seen.comparison)]
    one, _ = seen.step(first.step)
    micro = int(first.facts.get("microbatch", 1)) - 1
    name = first.name or "the model"
    if "BatchNorm" in kind or "InstanceNorm" in kind:
        return Cause("batch-norm statistics", f"{name} is a {kind}: its inputs are equal, its outputs are not.")
    draws = one.draws[micro] if micro < len(one.draws) else []
    if "Dropout" in kind or (draws and (any("Dropout" in k for k in inside) or not inside)):
        said = f"{name} is a {kind} and draws random numbers" if "Dropout" in kind else f"{name} ({kind}) may draw"
        return Cause("dropout masks", f"{said}; all before it is equal.")
    if any("BatchNorm" in k for k in inside):
        return Cause("batch-norm statistics", f"{name} holds a batch norm, and nothing before it differs.")
    return Cause("module", f"{name} ({kind}) is the first whose outputs differ; what went before is equal.")


def _loss(first: Difference, seen: _Evidence) -> Cause:
    if seen.count("module outputs", first.step) and not seen.faults("module outputs", first.step):
        return Cause("loss weighting", f"module outputs are equal, the loss is {_pair(first)}.")
    return Cause("loss", f"the loss is {_pair(first)}.")


def _gradient(first: Difference, seen: _Evidence) -> Cause:
    faults, count = seen.faults("gradients", first.step), seen.count("gradients", first.step)
    lacking = first.facts.get("lacking")
    if lacking:
        return Cause("missing reduction", f"{first.name} has no gradient on the side of {lacking}.")
    apart = [d for d in faults if "ranks apart" in d.facts]
    if apart:
        names = _some("gradient", [d.name for d in apart])
        return Cause("missing reduction", f"ranks have each their own value of {names}, which should be one.")
    factors = [_scaled(d) for d in faults]
    known = {round(f, 6) for f in factors if f is not None}
    if None not in factors and len(known) == 1:
        factor = next(f for f in factors if f is not None)
        text = f"{len(faults)} of {count} gradients are {_number(factor)} times those of one device"
        if _near(factor, seen.ranks):
            return Cause("doubled reduction", f"{text}, the number of ranks.")
        if _near(factor, 1 / seen.ranks):
            return Cause("missing reduction", f"{text}, one over the number of ranks.")
        if len(faults) == count > 1:
            return Cause("loss weighting", f"{text}: the same factor for each.")
    shares = [len(part) for micro in seen.step(first.step)[1].samples for part in micro]
    if len(faults) > count / 2 and first.kind == "gradients":
        uneven = (
            f"ranks have unequal shares ({', '.join(map(str, shares))})" if len(set(shares)) > 1 else "shares are equal"
        )
        return Cause("loss weighting", f"{len(faults)} of {count} gradients differ, ranks agree on them, {uneven}.")
    tied = [group for group in seen.one.tied if first.name in group]
    if tied:
        return Cause("tied weight", f"{first.name} is shared by {len(tied[0])} modules, and its gradient differs.")
    return Cause("backward", f"{len(faults)} of {count} gradients differ; {first.name} was the first to be ready.")


def _clipped(first: Difference, seen: _Evidence) -> Cause:
    factor = _scaled(first)
    more = "" if factor is None else f": they are {_number(factor)} times those of one device"
    return Cause("clip norm", f"gradients are equal before they are clipped, and not after{more}.")


def _rate(first: Difference, seen: _Evidence) -> Cause:
    mine = seen.one.steps
    rate, other = (float(first.facts.get(side, math.nan)) for side in ("one device", "the plan"))
    for factor, words in ((seen.ranks, str(seen.ranks)), (math.sqrt(seen.ranks), f"the root of {seen.ranks}")):
        if first.step == 1 and _near(other, rate * factor):
            return Cause("learning rate times devices", f"it is {_pair(first)}: {words} times as large.")
    later = [n for n, step in enumerate(mine, 1) if n > first.step and any(_near(other, rate) for rate in step.rates)]
    if later:
        return Cause(
            "scheduler ticks twice", f"the learning rate is {_pair(first)}, which one device has in step {later[0]}."
        )
    return Cause("scheduler", f"the learning rate is {_pair(first)}.")


def _scheduler(first: Difference, seen: _Evidence) -> Cause:
    one, plan = seen.step(first.step)
    ticks = [side.scheduler.get("last_epoch", math.nan) for side in (one, plan)]
    if ticks[1] > ticks[0]:
        text = f"after step {first.step} the scheduler has ticked {ticks[1]:g} times, on one device {ticks[0]:g} times."
        return Cause("scheduler ticks twice", text)
    return Cause("scheduler", f"{first.name} is {_pair(first)} after step {first.step}.")


def _stepped(first: Difference, seen: _Evidence) -> Cause:
    """Optimizer state or parameters differ, and the gradients do not."""
    one, plan = seen.step(first.step)
    before, mine = _parameters_before(seen.plan, first.step), _parameters_before(seen.one, first.step)
    moved = [n for n in one.parameters if n in before and not torch.equal(one.parameters[n], mine[n])]
    still = [n for n in moved if n in plan.parameters and torch.equal(plan.parameters[n], before[n])]
    name = first.name.split(" ")[0]
    if "ranks apart" in first.facts:
        return Cause("optimizer step", f"gradients are equal; ranks have each their own value of {name}.")
    strangers = [name for name in plan.optimizer if name.startswith("stranger")]
    lost = sorted(one.optimizer.keys() - plan.optimizer.keys())
    if strangers or still or lost:
        parts = [f"{_some('parameter', still)} did not move"] if still else []
        parts += [f"{_some('tensor', strangers)} of the optimizer are not the model's"] if strangers else []
        parts += [f"it holds no state of {_some('parameter', lost)}"] if lost and not strangers else []
        return Cause("optimizer bound to old parameters", f"gradients are equal; {'; '.join(parts)}.")
    rounded = _rounded_to(plan.parameters.get(name))
    if rounded and not _rounded_to(one.parameters.get(name)):
        return Cause("master weights", f"gradients are equal; every value of {name} is one that {rounded} can hold.")
    changed = seen.faults("parameters", first.step)
    return Cause("optimizer step", f"gradients are equal; {len(changed)} parameters differ after the step.")


def _buffer(first: Difference, seen: _Evidence) -> Cause:
    owner = module_of(first, seen.comparison)
    kind = seen.comparison.modules.get(owner, "")
    if "BatchNorm" in kind:
        return Cause("batch-norm statistics", f"outputs are equal, but {first.name} of {kind} is not.")
    ranks = "; ranks have each their own value of it" if "ranks apart" in first.facts else ""
    return Cause("buffer", f"{first.name} differs, and outputs and parameters are equal{ranks}.")


def _evaluated(first: Difference, seen: _Evidence) -> Cause:
    if first.name.endswith(UNSUMMED):
        what = first.name.removesuffix(f", {UNSUMMED}")
        return Cause(
            "evaluation without mw.sum",
            f"{what} had no mw.backward and no mw.sum, so each rank has the figure of its own share.",
        )
    if first.facts.get("repeated") or first.facts.get("missing"):
        return _samples(first, seen)
    ragged = len(seen.one.evaluated) % seen.ranks != 0
    text = f"parameters and buffers are equal; {first.name} is {_pair(first)}"
    if ragged:
        many = len(seen.one.evaluated)
        return Cause(
            "padded or repeated sample", f"{text}, over {many} samples, which {seen.ranks} ranks do not share evenly."
        )
    return Cause("evaluation", f"{text}.")


_RULES: dict[str, Callable[[Difference, _Evidence], Cause]] = {
    "tied weights": _tied,
    "initial parameters": _initial,
    "initial buffers": _initial,
    "sample order": _samples,
    "module outputs": _output,
    "loss": _loss,
    "gradients": _gradient,
    "gradient norm": _gradient,
    "clipped gradients": _clipped,
    "learning rate": _rate,
    "optimizer state": _stepped,
    "parameters": _stepped,
    "buffers": _buffer,
    "scheduler": _scheduler,
    "evaluation": _evaluated,
}


def _below(name: str, comparison: Comparison) -> list[str]:
    return [other for other in comparison.modules if other != name and (not name or other.startswith(f"{name}."))]


def _parameters_before(side: Side, step: int) -> dict[str, Tensor]:
    return side.initial if step == 1 else side.steps[step - 2].parameters


def _scaled(difference: Difference) -> float | None:
    """The factor by which a gradient is that of one device, where nothing else is wrong with it."""
    factor, rest = difference.facts.get("factor", math.nan), difference.facts.get("rest", math.nan)
    return float(factor) if rest <= 1e3 * LIMIT and factor != 0 else None


def _rounded_to(tensor: Tensor | None) -> str:
    """The lower precision that holds every value of `tensor` exactly; empty where there is none."""
    if tensor is None or not bool((tensor != 0).any()):
        return ""
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        if torch.equal(tensor.to(dtype).double(), tensor):
            return str(dtype).removeprefix("torch.")
    return ""


def _near(a: float, b: float) -> bool:
    return abs(a - b) <= 1e-6 * max(abs(a), abs(b), 1e-300)


def _pair(difference: Difference) -> str:
    one, plan = (difference.facts.get(side) for side in ("one device", "the plan"))
    return f"{_number(plan)} under the plan and {_number(one)} on one device"


def _number(value: Any) -> str:
    return f"{value:.12g}" if isinstance(value, float) else str(value)


def _some(what: str, items: Sequence[Any]) -> str:
    if not items:
        return f"no {what}"
    shown = ", ".join(map(str, items[:3]))
    return f"{shown} and {len(items) - 3} more" if len(items) > 3 else shown
