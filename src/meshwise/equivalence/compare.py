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
from typing import Any

import torch
from torch import Tensor

from meshwise.equivalence.contents import compared_fields
from meshwise.equivalence.left_out import Unseen, left_out
from meshwise.equivalence.noise import note_noise
from meshwise.equivalence.outputs import Layout, divided_outputs, has_rows_of_samples, is_sum_of, output_difference
from meshwise.equivalence.tolerance import FLOOR, LIMIT, apart, finite, largest, ratio
from meshwise.equivalence.trace import Divergence, Named, Output, StepTrace, Trace

MICROBATCHES = "number of microbatches"
"""How that difference in the order of samples is called."""
KINDS = (
    "races",
    "modules",
    "tied weights",
    "initial parameters",
    "initial buffers",
    "resumed state",
    "sample order",
    "batch contents",
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
    "steps",
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
    for number, (mine, other) in enumerate(zip(reference.steps, actual.steps, strict=False), 1):
        if number == len(actual.steps) > 1:
            found += [d for resumed in actual.resumed for d in _resumed(number, actual.steps[-2], resumed)]
        found += _samples(number, mine, other)
        contents = list(_contents(number, mine, other))
        gradients = _over_ranks(_gradients(number, mine, other), other.rank_divergence)
        outputs = _over_ranks(_outputs(number, mine, other, unseen), other.rank_divergence)
        wrong = any(d.fault for d in gradients)
        found += [d for d in contents if wrong or not d.fault]  # what differs and changes nothing may be anything
        found += outputs if wrong else _of_samples(outputs, unseen)
        found += gradients
        note_noise(noise, mine.gradients, other.gradients)
        found += _over_ranks(_after(number, mine, other, noise), other.rank_divergence)
    if actual.steps:
        found += _number_of_steps(len(reference.steps), len(actual.steps))
        found += _over_ranks(_evaluation(reference, actual), actual.rank_divergence)
    by_kind = {kind: [d for d in found if d.kind == kind] for kind in KINDS}
    kinds = tuple(_compared(kind, differences) for kind, differences in by_kind.items() if differences)
    first = next((d for d in found if d.fault), None)
    left = tuple(left_out(reference, actual, unseen, noise))
    return Comparison(kinds, tuple(found), first, reference.modules, left, tuple(unseen))


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
    kinds = ("modules", "tied weights")
    diverging = [[name for of, name in sorted(actual.rank_divergence) if of == kind] for kind in kinds]
    yield from (Difference("modules", 0, name, 0.0, 0.0) for name in diverging[0])
    mine, others = ({" = ".join(group) for group in side.tied} for side in (reference, actual))
    for group in sorted(mine | others | set(diverging[1])):
        one_side = group in mine ^ others
        facts = {"tied": "one device" if group in mine else "the plan"} if one_side else {}
        yield Difference("tied weights", 0, group, math.inf if one_side else 0.0, 0.0, facts)
    yield from _tensors("initial parameters", 0, reference.initial_parameters, actual.initial_parameters)
    yield from _tensors("initial buffers", 0, reference.initial_buffers, actual.initial_buffers)


def _number_of_steps(one: int, plan: int) -> Iterator[Difference]:
    if one != plan:
        facts = {"one device": one, "the plan": plan}
        yield Difference("steps", min(one, plan), "number of steps", math.inf, float(abs(one - plan)), facts)


def _resumed(step: int, before: StepTrace, after: StepTrace) -> Iterator[Difference]:
    """What a job goes on with, behind a resume, against what the plan itself had before it."""
    for kind in ("parameters", "buffers", "optimizer_state"):
        yield from _tensors("resumed state", step, getattr(before, kind), getattr(after, kind))
    yield from _numbers("resumed state", step, before.scheduler, after.scheduler)


def _samples(step: int, mine: StepTrace, other: StepTrace) -> Iterator[Difference]:
    for number, sides in enumerate(zip(mine.samples, other.samples, strict=False), 1):
        want, got = ([index for part in ranks for index in part] for ranks in sides)
        yield _indices("sample order", step, f"microbatch {number}", want, got)
    if len(mine.samples) != len(other.samples):
        facts = {"one device": len(mine.samples), "the plan": len(other.samples)}
        yield Difference("sample order", step, MICROBATCHES, math.inf, 0.0, facts)


def _indices(kind: str, step: int, name: str, want: Sequence[int], got: Sequence[int]) -> Difference:
    counts, wanted = Counter(got), Counter(want)
    facts = {"repeated": sorted((counts - wanted).elements()), "missing": sorted((wanted - counts).elements())}
    wrong = sum(a != b for a, b in zip(want, got, strict=False)) + abs(len(want) - len(got))
    return Difference(kind, step, name, math.inf if wrong else 0.0, float(wrong), facts if wrong else {})


def _contents(step: int, mine: StepTrace, other: StepTrace) -> Iterator[Difference]:
    for number, sides in enumerate(zip(mine.samples, other.samples, strict=False)):
        one, ranks = ([each for each in side.contents if each.microbatch == number] for side in (mine, other))
        samples = [[index for part in side for index in part] for side in sides]
        for found in compared_fields(one, ranks, *samples):
            facts = {
                "microbatch": number + 1,
                "sample": found.wrong[0],
                "how many": f"{len(found.wrong)} of {found.samples}",
                "from the first": samples[1][0] in found.wrong,
                "place": ranks[0].place,
                "source": ranks[0].source,
                "draws": ranks[0].draws,
                "collate": ranks[0].collate,
            } if found.wrong else {}  # fmt: skip
            yield Difference("batch contents", step, found.name, found.relative, found.absolute, facts)


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
    if mine.scheduler and other.scheduler:  # which a program that has ended may have let go
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
