"""Compare two sides: what differs, how much, and where it began.

The sides are the reference run on one device and the run under a plan. A difference is relative to the largest value of
the tensor, but at least to a thousandth of the largest of its kind in that step. Above `LIMIT` it is a fault. So is a
difference between ranks in a value that should be the same on all of them, even if rank 0 is right.

Elements of parameters and optimizer state whose gradient is only rounding are left out (see noise.py).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from meshwise.checker.contents import compared_contents
from meshwise.checker.difference import LIMIT, Difference, finite, numbers, tensors
from meshwise.checker.noise import note_noise
from meshwise.checker.outputs import Unseen, compared_outputs, of_samples, traced_back
from meshwise.checker.trace import Divergence, Named, StepTrace, Trace
from meshwise.spec.words import some
from meshwise.training.data.keyed import GENERATOR

MICROBATCHES = "number of microbatches"
"""The name of the `Difference` of the number of microbatches in a step."""
KINDS = (
    *("races", "modules", "tied weights", "initial parameters", "initial buffers", "resumed state", "sample order"),
    *("batch contents", "random draws", "model inputs", "module outputs", "loss"),
    *("gradients", "gradient norm", "clipped gradients", "learning rate"),
    *("optimizer state", "parameters", "buffers", "scheduler", "steps", "evaluation"),
)
"""The kinds of values that are compared, in the order in which a step produces them."""
HARDLY = 1e-3  # a difference counts as explained if a correction leaves less than this fraction of it


@dataclass(frozen=True)
class Compared:
    """A summary of all comparisons of one kind of value."""

    kind: str
    count: int
    faults: int
    largest: Difference


@dataclass(frozen=True)
class Comparison:
    """The comparison of the reference run on one device with the run under a plan."""

    kinds: tuple[Compared, ...]
    differences: tuple[Difference, ...]
    first: Difference | None
    modules: Mapping[str, str]
    left_out: tuple[str, ...]
    unseen: tuple[Unseen, ...] = ()

    @property
    def equal(self) -> bool:
        return self.first is None


def compare(reference: Trace, actual: Trace, *, divided: bool = False) -> Comparison:
    """Compare the run under a plan (`actual`) with the run on one device (`reference`).

    divided: whether the plan divides modules, so that values are exchanged between them."""
    found = [Difference("races", 0, race, math.inf) for race in actual.races]
    found += _over_ranks(_start(reference, actual), actual.rank_divergence)
    noise: dict[str, Tensor] = {}
    unseen: list[Unseen] = []
    for number, (mine, other) in enumerate(zip(reference.steps, actual.steps, strict=False), 1):
        for after, resumed in actual.resumed:
            found += _resumed(number, actual.steps[after - 1], resumed) if after == number - 1 else []
        found += _samples(number, mine, other)
        contents = list(compared_contents(number, mine, other))
        gradients = _reduced_by_hand(_over_ranks(_gradients(number, mine, other), other.rank_divergence))
        outputs = compared_outputs(number, mine, other, unseen, by_hand=bool(actual.exchanges))
        outputs = _over_ranks(outputs, other.rank_divergence)
        wrong = any(d.fault for d in gradients)
        found += [d for d in contents if wrong or not d.fault]  # different contents count only if gradients differ
        found += [Difference("random draws", number, line, math.inf) for line, _ in sorted(other.drawn_alike)]
        if wrong and not (divided or actual.exchanges):  # an input may then be a part of that on one device
            outputs = traced_back(outputs, mine, other)
        found += outputs if wrong else of_samples(outputs, unseen)
        found += gradients
        note_noise(noise, mine.gradients, other.gradients)
        found += _over_ranks(_after(number, mine, other, noise), other.rank_divergence)
    if actual.steps:
        found += _over_ranks(_ends(reference, actual), actual.rank_divergence)
    by_kind = {kind: [d for d in found if d.kind == kind] for kind in KINDS}
    kinds = tuple(_compared(kind, differences) for kind, differences in by_kind.items() if differences)
    first = next((d for d in found if d.fault), None)
    left = tuple(_left_out(reference, actual, unseen, noise))
    return Comparison(kinds, tuple(found), first, reference.modules, left, tuple(unseen))


def _left_out(reference: Trace, actual: Trace, unseen: Sequence[Unseen], noise: Named) -> Iterator[str]:
    """Yield sentences that say what the comparison leaves out."""
    for (module, kind, why), calls in Counter((each.module, each.kind, each.why) for each in unseen).items():
        yield f"outputs of {module or 'the model'} ({kind}): {why} ({calls} call{'s' * (calls > 1)})."
    small = {name: int(mask.sum()) for name, mask in noise.items() if bool(mask.any())}
    if small:
        count, total = sum(small.values()), sum(mask.numel() for mask in noise.values())
        many = [name for name, few in small.items() if few * 10 > noise[name].numel()]
        where = f", most of them in {some(many)}" if many else ""
        text = f"{count:,} of {total:,} values of the parameters after a step{where}"
        yield f"{text}: their gradients are so small that rounding is a large part of them."
    for name in sorted(reference.unkeyed | actual.unkeyed):
        differ = "each rank draws from its own" if name.endswith(GENERATOR) else "ranks draw different numbers"
        yield f"draws of {name}: it is not keyed, so {differ}."


def _compared(kind: str, differences: Sequence[Difference]) -> Compared:
    farthest = max(differences, key=lambda d: finite(d.relative))
    return Compared(kind, len(differences), sum(d.fault for d in differences), farthest)


def _over_ranks(differences: Iterable[Difference], divergence: Divergence) -> list[Difference]:
    """Return the differences, each at least as large as the difference between ranks in the same value."""
    found = []
    for d in differences:
        ranks = divergence.get((d.kind, d.name), 0.0)
        if ranks > LIMIT:
            facts = {**d.facts, "ranks apart": ranks, "first rank": d.relative}
            d = replace(d, relative=max(d.relative, ranks), facts=facts)
        found.append(d)
    return found


def _reduced_by_hand(gradients: list[Difference]) -> list[Difference]:
    """Return the differences, without errors that the program corrects itself before the step."""
    clipped = {d.name: d.relative for d in gradients if d.kind == "clipped gradients"}
    found = []
    for d in gradients:
        nearly = d.kind == "gradients" and d.fault and abs((d.factor or 1.0) - 1) < HARDLY
        corrected = nearly and clipped.get(d.name, math.inf) < HARDLY * d.relative
        found.append(replace(d, relative=clipped[d.name]) if corrected else d)
    if not any(d.fault for d in found if d.kind == "gradients"):  # then their norm is right too
        found = [replace(d, relative=0.0) if d.kind == "gradient norm" and d.fault else d for d in found]
    return found


def _start(reference: Trace, actual: Trace) -> Iterator[Difference]:
    kinds = ("modules", "tied weights")
    diverging = [[name for of, name in sorted(actual.rank_divergence) if of == kind] for kind in kinds]
    yield from (Difference("modules", 0, name, 0.0) for name in diverging[0])
    mine, others = ({" = ".join(group) for group in side.tied} for side in (reference, actual))
    for group in sorted(mine | others | set(diverging[1])):
        one_side = group in mine ^ others
        facts = {"tied": "one device" if group in mine else "the plan"} if one_side else {}
        yield Difference("tied weights", 0, group, math.inf if one_side else 0.0, facts)
    yield from tensors("initial parameters", 0, reference.initial_parameters, actual.initial_parameters)
    yield from tensors("initial buffers", 0, reference.initial_buffers, actual.initial_buffers)


def _resumed(step: int, before: StepTrace, after: StepTrace) -> Iterator[Difference]:
    """Compare the state of a job right after a resume with its state before the resume."""
    for kind in ("parameters", "buffers", "optimizer_state"):
        yield from tensors("resumed state", step, getattr(before, kind), getattr(after, kind))
    yield from numbers("resumed state", step, before.scheduler, after.scheduler)


def _samples(step: int, mine: StepTrace, other: StepTrace) -> Iterator[Difference]:
    for number, sides in enumerate(zip(mine.samples, other.samples, strict=False), 1):
        want, got = ([index for part in ranks for index in part] for ranks in sides)
        yield _indices("sample order", step, f"microbatch {number}", want, got)
    if len(mine.samples) != len(other.samples):
        facts = {"one device": len(mine.samples), "the plan": len(other.samples)}
        yield Difference("sample order", step, MICROBATCHES, math.inf, facts)


def _indices(kind: str, step: int, name: str, want: Sequence[int], got: Sequence[int]) -> Difference:
    counts, wanted = Counter(got), Counter(want)
    facts = {"repeated": sorted((counts - wanted).elements()), "missing": sorted((wanted - counts).elements())}
    alike = want == got
    return Difference(kind, step, name, 0.0 if alike else math.inf, {} if alike else facts)


def _gradients(step: int, mine: StepTrace, other: StepTrace) -> Iterator[Difference]:
    """Yield the comparisons of the loss and the gradients, in the order of the backward on one device."""
    yield from numbers("loss", step, {"loss": mine.loss}, {"loss": other.loss})
    order = dict.fromkeys([*mine.ready_order, *mine.gradients])
    wanted = {name: mine.gradients[name] for name in order if name in mine.gradients}
    yield from tensors("gradients", step, wanted, other.gradients, facts=multiple)
    sides = wanted, other.gradients
    norms = [{"all gradients": math.hypot(*(float(t.norm()) for t in named.values()))} for named in sides]
    yield from numbers("gradient norm", step, *norms)
    clipped = mine.clipped_gradients, other.clipped_gradients
    yield from tensors("clipped gradients", step, *clipped, facts=multiple)


def _after(step: int, mine: StepTrace, other: StepTrace, noise: Named) -> Iterator[Difference]:
    yield from numbers("learning rate", step, mine.learning_rates, other.learning_rates)
    sides = mine.optimizer_state, other.optimizer_state
    for key in sorted({name.rsplit(" ", 1)[1] for state in sides for name in state}):
        states = [{n: t for n, t in state.items() if n.endswith(f" {key}")} for state in sides]
        of_key = {f"{name} {key}": mask for name, mask in noise.items()}
        yield from tensors("optimizer state", step, *states, noise=of_key)
    yield from tensors("parameters", step, mine.parameters, other.parameters, noise=noise)
    yield from tensors("buffers", step, mine.buffers, other.buffers)
    if mine.scheduler and other.scheduler:  # a program that has ended may have dropped its scheduler
        yield from numbers("scheduler", step, mine.scheduler, other.scheduler)


def _ends(reference: Trace, actual: Trace) -> Iterator[Difference]:
    """Yield the comparisons of the number of steps, and of what is evaluated."""
    steps, others = len(reference.steps), len(actual.steps)
    if steps != others:
        facts = {"one device": steps, "the plan": others}
        yield Difference("steps", min(steps, others), "number of steps", math.inf, facts)
    if reference.evaluated or actual.evaluated:
        yield _indices("evaluation", steps, "samples", sorted(reference.evaluated), sorted(actual.evaluated))
    yield from numbers("evaluation", steps, reference.evaluation, actual.evaluation)


def multiple(mine: Tensor, other: Tensor) -> dict[str, float]:
    """Return the factor that maps `mine` to `other` by least squares, and the relative residual."""
    square = float((mine * mine).sum())
    factor = float((mine * other).sum()) / square if square else math.nan
    length = float(other.norm())
    return {"factor": factor, "rest": float((other - factor * mine).norm()) / length if length else math.nan}
