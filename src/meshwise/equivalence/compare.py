"""Two sides compared: what differs, how much, and where it began.

A difference is relative to the larger of the tensor's own largest value and a thousandth of the largest among all
tensors of its kind in that step: a gradient that is zero but for rounding has no size of its own. Above `LIMIT` it is
a fault. So are ranks that differ from each other in what should be one value, even where rank 0 is right.

Left out of parameters and optimizer state: elements whose gradient was zero but for rounding in some step (below
1e-8 of the largest gradient, yet not zero on both sides; see noise.py). Adam turns that noise into whole steps.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from meshwise.data.keyed import GENERATOR
from meshwise.equivalence.noise import note_noise
from meshwise.equivalence.outputs import Layout, divided_outputs, has_rows_of_samples, is_sum_of, output_difference
from meshwise.equivalence.tolerance import FLOOR, LIMIT, apart, finite, largest, ratio
from meshwise.equivalence.trace import Divergence, Named, Output, StepTrace, Trace
from meshwise.spec.words import some

NORMALISED = ("exp_avg", "exp_avg_sq", "exp_inf", "square_avg", "sum")
"""What the state of an optimizer holds that divides a gradient by its size."""
ADAPTIVE_STEPS = (
    "This optimizer divides it by its size, so in float32 it takes steps of up to the learning rate in directions of "
    "no meaning, others on each number of devices. Training is the same; an evaluation, whose running statistics lag "
    "behind, differs a little. Write bias=False there."
)

KINDS = (
    "races",
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
    """One thing that both sides have, and how much they differ in it.

    kind: one of `KINDS`. step: from 1; 0 before the first. name: parameter, module, metric. relative, absolute: the
    size of the difference; infinite where one side lacks it. facts: what else is known of it.
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

    @property
    def factor(self) -> float | None:
        """The factor by which a gradient is that of one device, where nothing else is wrong with it."""
        factor, rest = self.facts.get("factor", math.nan), self.facts.get("rest", math.nan)
        return float(factor) if rest <= 1e3 * LIMIT and factor != 0 else None


@dataclass(frozen=True)
class Compared:
    """All comparisons of one kind: how many, how many of them are faults, and the largest difference."""

    kind: str
    count: int
    faults: int
    largest: Difference


@dataclass(frozen=True)
class Unseen:
    """The output of a call that could not be compared. at: its place among those of the step."""

    step: int
    at: int
    module: str
    kind: str
    why: str


@dataclass(frozen=True)
class Comparison:
    """Two sides compared. first: the first fault in the order in which things happen; None when they are equal.

    modules: class of each module. left_out: what could not be compared, with the reason, a sentence each. unseen: the
    outputs among it.
    """

    kinds: tuple[Compared, ...]
    differences: tuple[Difference, ...]
    first: Difference | None
    modules: Mapping[str, str]
    left_out: tuple[str, ...]
    unseen: tuple[Unseen, ...] = ()

    @property
    def equal(self) -> bool:
        return self.first is None


def compare(reference: Trace, actual: Trace) -> Comparison:
    """Compare one device with a plan."""
    found = [Difference("races", 0, race, math.inf, 0.0) for race in actual.races]
    found += _over_ranks(_start(reference, actual), actual.rank_divergence)
    noise: dict[str, Tensor] = {}
    unseen: list[Unseen] = []
    for number, (mine, other) in enumerate(zip(reference.steps, actual.steps, strict=bool(actual.steps)), 1):
        found += _samples(number, mine, other)
        gradients = _over_ranks(_gradients(number, mine, other), other.rank_divergence)
        outputs = _over_ranks(_outputs(number, mine, other, unseen), other.rank_divergence)
        found += outputs if any(d.fault for d in gradients) else _of_samples(outputs, unseen)
        found += gradients
        note_noise(noise, mine.gradients, other.gradients)
        found += _over_ranks(_after(number, mine, other, noise), other.rank_divergence)
    if actual.steps:
        found += _over_ranks(_evaluation(reference, actual), actual.rank_divergence)
    by_kind = {kind: [d for d in found if d.kind == kind] for kind in KINDS}
    kinds = tuple(_compared(kind, differences) for kind, differences in by_kind.items() if differences)
    first = next((d for d in found if d.fault), None)
    left_out = tuple(_left_out(reference, actual, unseen, noise))
    return Comparison(kinds, tuple(found), first, reference.modules, left_out, tuple(unseen))


def _compared(kind: str, differences: Sequence[Difference]) -> Compared:
    farthest = max(differences, key=lambda d: finite(d.relative))
    return Compared(kind, len(differences), sum(d.fault for d in differences), farthest)


def _over_ranks(differences: Iterable[Difference], divergence: Divergence) -> list[Difference]:
    """Ranks that differ in what should be one value are a fault, even where rank 0 is right."""
    found = []
    for d in differences:
        ranks = divergence.get((d.kind, d.name), 0.0)
        if ranks > LIMIT:
            d = replace(
                d, relative=max(d.relative, ranks), facts={**d.facts, "ranks apart": ranks, "first rank": d.relative}
            )
        found.append(d)
    return found


def _start(reference: Trace, actual: Trace) -> Iterator[Difference]:
    diverging = [[name for of, name in sorted(actual.rank_divergence) if of == kind] for kind in KINDS[:2]]
    yield from (Difference("modules", 0, name, 0.0, 0.0) for name in diverging[0])
    mine, others = ({" = ".join(group) for group in side.tied} for side in (reference, actual))
    for group in sorted(mine | others | set(diverging[1])):
        one_side = group in mine ^ others
        facts = {"tied": "one device" if group in mine else "the plan"} if one_side else {}
        yield Difference("tied weights", 0, group, math.inf if one_side else 0.0, 0.0, facts)
    yield from _tensors("initial parameters", 0, reference.initial_parameters, actual.initial_parameters)
    yield from _tensors("initial buffers", 0, reference.initial_buffers, actual.initial_buffers)


def _samples(step: int, mine: StepTrace, other: StepTrace) -> Iterator[Difference]:
    for number, sides in enumerate(zip(mine.samples, other.samples, strict=False), 1):
        want, got = ([index for part in ranks for index in part] for ranks in sides)
        yield _indices("sample order", step, f"microbatch {number}", want, got)
    if len(mine.samples) != len(other.samples):
        facts = {"one device": len(mine.samples), "the plan": len(other.samples)}
        yield Difference("sample order", step, "number of microbatches", math.inf, 0.0, facts)


def _indices(kind: str, step: int, name: str, want: Sequence[int], got: Sequence[int]) -> Difference:
    counts, wanted = Counter(got), Counter(want)
    facts = {"repeated": sorted((counts - wanted).elements()), "missing": sorted((wanted - counts).elements())}
    wrong = sum(a != b for a, b in zip(want, got, strict=False)) + abs(len(want) - len(got))
    return Difference(kind, step, name, math.inf if wrong else 0.0, float(wrong), facts if wrong else {})


def _outputs(step: int, mine: StepTrace, other: StepTrace, unseen: list[Unseen]) -> Iterator[Difference]:
    theirs: dict[Any, list[Output]] = defaultdict(list)
    for output in other.outputs:
        theirs[output.key].append(output)
    sizes = [output_difference(one, theirs[one.key]) if theirs[one.key] else None for one in mine.outputs]
    ways = [[] if size else _other_ways(one, theirs[one.key]) for one, size in zip(mine.outputs, sizes, strict=True)]
    layouts = {layout for way in ways for layout, size in way if size[0] <= LIMIT}
    for at, (output, size, way) in enumerate(zip(mine.outputs, sizes, ways, strict=True)):
        near = [found for layout, found in way if layout in layouts]  # those of its neighbours
        size = size or min(near, default=None)
        if size is None and is_sum_of(output, theirs[output.key]):
            size = 0.0, 0.0
        if size is None:
            single = math.prod(output.shape) == 1
            why = "one number of the whole batch, such as a loss in it" if single else "not that of single samples"
            why = why if theirs[output.key] else "under the plan its forward hooks saw no such call"
            unseen.append(Unseen(step, at, output.module, output.kind, why))
        else:
            facts = {"class": output.kind, "microbatch": output.microbatch + 1, "call": output.number + 1, "at": at}
            yield Difference("module outputs", step, output.module, *size, facts)


def _other_ways(one: Output, ranks: Sequence[Output]) -> list[tuple[Layout, tuple[float, float]]]:
    """How an output may be divided over the ranks that is not divided by samples."""
    return [] if has_rows_of_samples(one, ranks) else list(divided_outputs(one, ranks))


def _of_samples(outputs: Iterable[Difference], unseen: list[Unseen]) -> Iterator[Difference]:
    """The outputs of a step whose loss and gradients are equal: what differs among them was taken for rows of samples
    by mistake (the tokens of an expert, as many as there are samples by chance)."""
    for difference in outputs:
        if difference.fault:
            why = "its rows are not those of the samples, since nothing made of them differs"
            at, kind = difference.facts["at"], difference.facts["class"]
            unseen.append(Unseen(difference.step, at, difference.name, kind, why))
        else:
            yield difference


def _gradients(step: int, mine: StepTrace, other: StepTrace) -> Iterator[Difference]:
    """The loss, and gradients in backward order: as they became ready on one device."""
    yield from _numbers("loss", step, {"loss": mine.loss}, {"loss": other.loss})
    order = dict.fromkeys([*mine.ready_order, *mine.gradients])
    wanted = {name: mine.gradients[name] for name in order if name in mine.gradients}
    yield from _tensors("gradients", step, wanted, other.gradients, facts=_gradient_facts)
    norms = [{"all gradients": _norm(gradients)} for gradients in (wanted, other.gradients)]
    yield from _numbers("gradient norm", step, *norms)
    clipped = mine.clipped_gradients, other.clipped_gradients
    yield from _tensors("clipped gradients", step, *clipped, facts=_gradient_facts)


def _after(step: int, mine: StepTrace, other: StepTrace, noise: Named) -> Iterator[Difference]:
    yield from _numbers("learning rate", step, mine.learning_rates, other.learning_rates)
    sides = mine.optimizer_state, other.optimizer_state
    for key in sorted({name.rsplit(" ", 1)[1] for state in sides for name in state}):
        states = [{n: t for n, t in state.items() if n.endswith(f" {key}")} for state in sides]
        of_key = {f"{name} {key}": mask for name, mask in noise.items()}
        yield from _tensors("optimizer state", step, *states, noise=of_key)
    yield from _tensors("parameters", step, mine.parameters, other.parameters, noise=noise)
    yield from _tensors("buffers", step, mine.buffers, other.buffers)
    yield from _numbers("scheduler", step, mine.scheduler, other.scheduler)


def _evaluation(reference: Trace, actual: Trace) -> Iterator[Difference]:
    steps = len(reference.steps)
    if reference.evaluated or actual.evaluated:
        yield _indices("evaluation", steps, "samples", sorted(reference.evaluated), sorted(actual.evaluated))
    yield from _numbers("evaluation", steps, reference.evaluation, actual.evaluation)


def _numbers(kind: str, step: int, mine: Mapping[str, float], others: Mapping[str, float]) -> Iterator[Difference]:
    """Numbers by name; what one side lacks is not a number there."""
    for name in sorted(mine.keys() | others.keys()):
        one, plan = mine.get(name, math.nan), others.get(name, math.nan)
        alike = one == plan or (name in mine and name in others and math.isnan(one) and math.isnan(plan))
        far = 0.0 if alike else finite(abs(one - plan))
        relative = finite(far / max(abs(one), torch.finfo(torch.float64).tiny)) if far else 0.0
        yield Difference(kind, step, name, relative, far, {"one device": one, "the plan": plan})


def _tensors(
    kind: str,
    step: int,
    mine: Named,
    others: Named,
    *,
    noise: Mapping[str, Tensor] | None = None,
    facts: Callable[[Tensor, Tensor], dict[str, float]] | None = None,
) -> Iterator[Difference]:
    """Tensors by name. noise: elements that are not compared. `facts(mine, other)` says more of those that differ."""
    most = largest(mine.values())
    for name in dict.fromkeys([*mine, *others]):
        if name not in mine or name not in others:
            lacks = {"lacking": "one device" if name not in mine else "the plan"}
            yield Difference(kind, step, name, math.inf, 0.0, lacks)
            continue
        a, b = mine[name].double(), others[name].double()
        if a.shape != b.shape:
            shapes = {"one device": tuple(a.shape), "the plan": tuple(b.shape)}
            yield Difference(kind, step, name, math.inf, 0.0, shapes)
            continue
        far = apart(a, b).abs()
        if noise and name in noise and noise[name].shape == far.shape:
            far = far.masked_fill(noise[name], 0.0)
        relative = ratio(far, torch.tensor(max(largest([a]), FLOOR * most), dtype=torch.float64))
        more = facts(a, b) if facts is not None and not relative <= LIMIT else {}
        yield Difference(kind, step, name, relative, finite(float(far.max())) if far.numel() else 0.0, more)


def _gradient_facts(mine: Tensor, other: Tensor) -> dict[str, float]:
    """The factor that `other` is of `mine`, and what is left when `mine` times it is taken away, of its length."""
    square = float((mine * mine).sum())
    factor = float((mine * other).sum()) / square if square else math.nan
    length = float(other.norm())
    return {"factor": factor, "rest": float((other - factor * mine).norm()) / length if length else math.nan}


def _norm(named: Named) -> float:
    return math.sqrt(sum(float((t * t).sum()) for t in named.values()))


def _left_out(reference: Trace, actual: Trace, unseen: Sequence[Unseen], noise: Named) -> Iterator[str]:
    for (module, kind, why), calls in Counter((each.module, each.kind, each.why) for each in unseen).items():
        yield f"outputs of {module or 'the model'} ({kind}): {why} ({calls} call{'s' * (calls > 1)})."
    small = {name: int(mask.sum()) for name, mask in noise.items() if bool(mask.any())}
    if small:
        count, total = sum(small.values()), sum(mask.numel() for mask in noise.values())
        many = [name for name, few in small.items() if few * 10 > noise[name].numel()]
        where = f", most of them in {some(many)}" if many else ""
        yield (
            f"{count:,} of {total:,} values of the parameters after a step{where}: "
            "their gradients are so small that rounding is much of them."
        )
        if biases := _of_norms(reference, many):
            yield (
                f"of these, {some(biases)}: a bias in front of a batch norm, which takes it out again, so its gradient "
                f"is zero but for rounding. {ADAPTIVE_STEPS}"
            )
    for name in sorted(reference.unkeyed | actual.unkeyed):
        differ = "ranks draw what theirs holds" if name.endswith(GENERATOR) else "ranks draw different numbers"
        yield f"draws of {name}: it is not keyed, so {differ}."
    for name in sorted(actual.drawn_alike):
        yield (
            f"draws of {name} after mw.split, for the rows of a rank: in a run every rank draws the same numbers. Draw "
            "them for the whole batch, and give them to mw.split with it."
        )


def _of_norms(reference: Trace, names: Sequence[str]) -> list[str]:
    """Those that are a bias in front of a batch norm, under an optimizer that divides by the size of gradients."""
    calls = [output for step in reference.steps[:1] for output in step.outputs]
    behind = {one.module: following.kind for one, following in pairwise(calls)}
    adapted = {n.rpartition(" ")[0] for n in reference.steps[0].optimizer_state if n.rpartition(" ")[2] in NORMALISED}
    kinds = {name: behind.get(name.removesuffix(".bias"), "") for name in names if name in adapted}
    return [name for name, kind in kinds.items() if "BatchNorm" in kind or "InstanceNorm" in kind]
