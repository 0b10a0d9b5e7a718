"""Two sides compared: what differs, how much, and where it began.

A difference is relative to the larger of the tensor's own largest value and a thousandth of the largest among all
tensors of its kind in that step: a gradient that is zero but for rounding has no size of its own. Above `LIMIT` it is
a fault.

Left out of parameters and optimizer state: elements whose gradient was zero but for rounding in some step (below
1e-8 of the largest gradient, yet not zero on both sides). Adam turns that noise into whole steps.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from meshwise.equivalence.outputs import outputs_apart
from meshwise.equivalence.seen import Named, Side, Step
from meshwise.equivalence.sizes import FLOOR, LIMIT, finite, ratio

NOISE = 1e-8  # of the largest gradient

KINDS = (
    "modules",
    "tied weights",
    "initial parameters",
    "initial buffers",
    "sample order",
    "module outputs",
    "loss",
    "gradients",
    "gradient norm",
    "clipped gradients",
    "learning rate",
    "optimizer state",
    "parameters",
    "buffers",
    "scheduler",
    "evaluation",
)
"""What is compared, in the order in which a step makes it."""


@dataclass(frozen=True)
class Difference:
    """One thing that both sides have, and how far apart they are in it.

    kind: one of `KINDS`. step: from 1; 0 before the first. name: parameter, module, metric. relative, absolute: how far
    apart; infinite where one side lacks it. facts: what else is known of it.
    """

    kind: str
    step: int
    name: str
    relative: float
    absolute: float
    facts: Mapping[str, Any] = field(default_factory=dict)

    @property
    def fault(self) -> bool:
        return not self.relative <= LIMIT


@dataclass(frozen=True)
class Compared:
    """All comparisons of one kind: how many, how many of them are faults, and the largest difference."""

    kind: str
    count: int
    faults: int
    largest: Difference | None


@dataclass(frozen=True)
class Comparison:
    """Two sides compared. first: the first fault in the order in which things happen; None when they are equal.

    modules: class of each module. left_out: what could not be compared, with the reason, a sentence each.
    """

    kinds: tuple[Compared, ...]
    differences: tuple[Difference, ...]
    first: Difference | None
    modules: Mapping[str, str]
    left_out: tuple[str, ...]

    @property
    def equal(self) -> bool:
        return self.first is None


def compare(one: Side, plan: Side) -> Comparison:
    """Compare the reference `one` with the side of a plan."""
    found = list(_before(one, plan))
    noise: dict[str, Tensor] = {}
    apart_layouts: Counter[str] = Counter()
    for number, (mine, other) in enumerate(zip(one.steps, plan.steps, strict=bool(plan.steps)), 1):
        found += _samples(number, mine, other)
        made = [_with_ranks(_number("loss", number, "loss", mine.loss, other.loss), other.apart, "loss")]
        made += _gradients(number, mine, other)
        outputs = list(_outputs(number, mine, other, apart_layouts))
        found += outputs if any(d.fault for d in made) else _of_samples(outputs, apart_layouts)
        found += made
        _note_noise(noise, mine.gradients, other.gradients)
        found += _after(number, mine, other, noise)
    found += _evaluation(one, plan) if plan.steps else ()
    kinds = []
    for kind in KINDS:
        of_kind = [d for d in found if d.kind == kind]
        largest = max(of_kind, key=lambda d: math.inf if math.isnan(d.relative) else d.relative, default=None)
        if of_kind:
            kinds.append(Compared(kind, len(of_kind), sum(d.fault for d in of_kind), largest))
    first = next((d for d in found if d.fault), None)
    left_out = tuple(_left_out(apart_layouts, noise, one.unkeyed | plan.unkeyed))
    return Comparison(tuple(kinds), tuple(found), first, one.modules, left_out)


def _before(one: Side, plan: Side) -> Iterator[Difference]:
    mine, others = set(one.tied), set(plan.tied)
    for name in sorted(name.removeprefix("module ") for name in plan.apart if name.startswith("module ")):
        yield Difference("modules", 0, name, math.inf, 0.0, {"ranks apart": math.inf})
    on_some = {tuple(key.removeprefix("tied weights ").split(" = ")) for key in plan.apart if key.startswith("tied ")}
    for group in sorted(mine | others | on_some):
        same = group in mine and group in others
        facts = {} if same else {"tied": "one device" if group in mine else "the plan"}
        difference = Difference("tied weights", 0, " = ".join(group), 0.0 if same else math.inf, 0.0, facts)
        yield _with_ranks(difference, plan.apart, "tied weights")
    for difference in _named("initial parameters", 0, one.initial, plan.initial):
        yield _with_ranks(difference, plan.apart, "parameter")
    for difference in _named("initial buffers", 0, one.initial_buffers, plan.initial_buffers):
        yield _with_ranks(difference, plan.apart, "buffer")


def _samples(step: int, mine: Step, other: Step) -> Iterator[Difference]:
    for number, (wanted, ranks) in enumerate(zip(mine.samples, other.samples, strict=False)):
        want = [index for part in wanted for index in part]
        got = [index for part in ranks for index in part]
        yield _indices("sample order", step, f"microbatch {number + 1}", want, got)
    if len(mine.samples) != len(other.samples):
        facts = {"one device": len(mine.samples), "the plan": len(other.samples)}
        yield Difference("sample order", step, "number of microbatches", math.inf, 0.0, facts)


def _indices(kind: str, step: int, name: str, want: Sequence[int], got: Sequence[int]) -> Difference:
    counts, wanted = Counter(got), Counter(want)
    facts = {"repeated": sorted((counts - wanted).elements()), "missing": sorted((wanted - counts).elements())}
    wrong = sum(a != b for a, b in zip(want, got, strict=False)) + abs(len(want) - len(got))
    return Difference(kind, step, name, math.inf if wrong else 0.0, float(wrong), facts if wrong else {})


def _outputs(step: int, mine: Step, other: Step, apart: Counter[str]) -> Iterator[Difference]:
    theirs = {output.key: output for output in other.outputs}
    for output in mine.outputs:
        match = theirs.get(output.key)
        where = output.module or "the model"
        if match is None:
            apart[f"{where} ({output.kind}): under the plan its forward hooks saw no such call"] += 1
            continue
        sizes = outputs_apart(output, match)
        if sizes is None:
            single = bool(output.shapes) and math.prod(output.shapes[0]) == 1
            what = "one number of the whole batch, such as a loss in it" if single else "not that of single samples"
            apart[f"{where} ({output.kind}): {what}"] += 1
        else:
            facts = {"class": output.kind, "microbatch": output.microbatch + 1, "call": output.number + 1}
            yield Difference("module outputs", step, output.module, *sizes, facts)


def _of_samples(outputs: Iterable[Difference], apart: Counter[str]) -> Iterator[Difference]:
    """The outputs of a step whose loss and gradients are equal: what differs among them was taken for rows of samples,
    and is none (the tokens of an expert, as many as there are samples by chance)."""
    for difference in outputs:
        if difference.fault:
            where = f"{difference.name or 'the model'} ({difference.facts['class']})"
            apart[f"{where}: its rows are not those of the samples, since nothing made of them differs"] += 1
        else:
            yield difference


def _gradients(step: int, mine: Step, other: Step) -> Iterator[Difference]:
    """In backward order: as they became ready on one device."""
    order = [*mine.ready, *(name for name in mine.gradients if name not in mine.ready)]
    wanted = {name: mine.gradients[name] for name in order if name in mine.gradients}
    for difference in _named("gradients", step, wanted, other.gradients, facts=_gradient_facts):
        yield _with_ranks(difference, other.apart, "gradient")
    yield _number("gradient norm", step, "all gradients", _norm(wanted), _norm(other.gradients))
    if mine.clipped or other.clipped:
        for difference in _named("clipped gradients", step, mine.clipped, other.clipped, facts=_gradient_facts):
            yield _with_ranks(difference, other.apart, "clipped gradient")


def _with_ranks(difference: Difference, found: Mapping[str, float], what: str) -> Difference:
    """Ranks that are apart in what should be one value, `what NAME`, are a fault, even where rank 0 is right."""
    apart = found.get(f"{what} {difference.name}", 0.0)
    if apart <= LIMIT:
        return difference
    larger = max(difference.relative, apart)
    return replace(difference, relative=larger, facts={**difference.facts, "ranks apart": apart})


def _after(step: int, mine: Step, other: Step, noise: Named) -> Iterator[Difference]:
    for number in range(max(len(mine.rates), len(other.rates))):
        rates = [side.rates[number] if number < len(side.rates) else math.nan for side in (mine, other)]
        yield _with_ranks(_number("learning rate", step, f"group {number}", *rates), other.apart, "learning rate")
    keys = {key for state in (*mine.optimizer.values(), *other.optimizer.values()) for key in state}
    for key in sorted(keys):
        states = [{n: s[key] for n, s in side.optimizer.items() if key in s} for side in (mine, other)]
        for difference in _named("optimizer state", step, *states, noise=noise):
            named = replace(difference, name=f"{difference.name} {key}")
            yield _with_ranks(named, other.apart, "optimizer state")
    for difference in _named("parameters", step, mine.parameters, other.parameters, noise=noise):
        yield _with_ranks(difference, other.apart, "parameter")
    for difference in _named("buffers", step, mine.buffers, other.buffers):
        yield _with_ranks(difference, other.apart, "buffer")
    for name in sorted(mine.scheduler.keys() | other.scheduler.keys()):
        numbers = [side.scheduler.get(name, math.nan) for side in (mine, other)]
        yield _with_ranks(_number("scheduler", step, name, *numbers), other.apart, "scheduler")


def _evaluation(one: Side, plan: Side) -> Iterator[Difference]:
    steps = len(one.steps)
    if one.evaluated or plan.evaluated:
        yield _indices("evaluation", steps, "samples", sorted(one.evaluated), sorted(plan.evaluated))
    for name in sorted(one.evaluation.keys() | plan.evaluation.keys()):
        numbers = [side.evaluation.get(name, math.nan) for side in (one, plan)]
        yield _with_ranks(_number("evaluation", steps, name, *numbers), plan.apart, "evaluation")


def _number(kind: str, step: int, name: str, mine: float, other: float) -> Difference:
    facts = {"one device": mine, "the plan": other}
    if mine == other:
        return Difference(kind, step, name, 0.0, 0.0, facts)
    size = max(abs(mine), torch.finfo(torch.float64).tiny)
    return Difference(kind, step, name, finite(abs(mine - other) / size), finite(abs(mine - other)), facts)


def _named(
    kind: str, step: int, mine: Named, others: Named, *, noise: Named | None = None, facts: Any = None
) -> Iterator[Difference]:
    """Tensors by name. `facts(mine, other)` says more of those that differ."""
    most = max((float(t.abs().max()) for t in mine.values() if t.numel() and t.is_floating_point()), default=0.0)
    for name in [*mine, *(name for name in others if name not in mine)]:
        if name not in mine or name not in others:
            lacks = "one device" if name not in mine else "the plan"
            yield Difference(kind, step, name, math.inf, 0.0, {"lacking": lacks})
            continue
        a, b = mine[name], others[name]
        if a.shape != b.shape:
            shapes = {"one device": tuple(a.shape), "the plan": tuple(b.shape)}
            yield Difference(kind, step, name, math.inf, 0.0, shapes)
            continue
        a, b = a.double(), b.double()
        apart = (a - b).abs()
        if noise is not None and name in noise and noise[name].shape == apart.shape:
            apart = apart.masked_fill(noise[name], 0.0)
        own = float(a.abs().max()) if a.numel() else 0.0
        relative = ratio(apart, torch.tensor(max(own, FLOOR * most), dtype=torch.float64))
        more = facts(a, b) if facts is not None and not relative <= LIMIT else {}
        yield Difference(kind, step, name, relative, finite(float(apart.max())) if apart.numel() else 0.0, more)


def _gradient_facts(mine: Tensor, other: Tensor) -> dict[str, float]:
    """The factor that `other` is of `mine`, and what is left when `mine` times it is taken away, of its length."""
    square = float((mine * mine).sum())
    factor = float((mine * other).sum()) / square if square else math.nan
    length = float(other.norm())
    return {"factor": factor, "rest": float((other - factor * mine).norm()) / length if length else math.nan}


def _norm(named: Named) -> float:
    return math.sqrt(sum(float((t * t).sum()) for t in named.values()))


def _note_noise(noise: Named, mine: Named, others: Named) -> None:
    most = max((float(t.abs().max()) for t in mine.values() if t.numel()), default=0.0)
    for name in mine.keys() & others.keys():
        a, b = mine[name].abs(), others[name].abs()
        if a.shape != b.shape:
            continue
        larger = torch.maximum(a, b)
        small = (larger <= NOISE * most) & (larger > 0)
        noise[name] = small | noise[name] if name in noise else small


def _left_out(apart: Counter[str], noise: Named, unkeyed: set[str]) -> Iterator[str]:
    for where, calls in apart.items():
        yield f"outputs of {where} ({calls} call{'s' * (calls > 1)})."
    small = {name: int(mask.sum()) for name, mask in noise.items() if bool(mask.any())}
    if small:
        count, total = sum(small.values()), sum(mask.numel() for mask in noise.values())
        many = [name for name, few in small.items() if few * 10 > noise[name].numel()]
        where = f", most of them in {', '.join(many[:3])}{' and others' if len(many) > 3 else ''}" if many else ""
        yield (
            f"{count:,} of {total:,} values of the parameters after a step{where}: "
            "their gradients are so small that rounding is much of them."
        )
    for name in sorted(unkeyed):
        yield f"draws of {name}: it is not keyed, so ranks draw on their own."
