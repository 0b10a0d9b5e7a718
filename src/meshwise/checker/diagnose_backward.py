"""Find a missing or extra sum in a program's hand-written backward.

The evidence is the gradients that reach the outputs of modules. Ranks with the same samples should get the whole
gradient of an output. If they get only parts of it, or a multiple, the module that uses the output lacks a sum over
ranks in its backward, or sums once too often. If the gradients of all outputs are right, the gradient of a parameter is
itself only a part.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from meshwise.checker.causes import Cause
from meshwise.checker.causes import CauseKind as K
from meshwise.checker.difference import LIMIT
from meshwise.checker.evidence import Evidence, is_inside, near, owner_of
from meshwise.checker.outputs import Groups, adds_up_to, divided_outputs, divided_rows, output_difference, peers_in
from meshwise.checker.rank_weights import RankWeights, solve, weights_in
from meshwise.checker.trace import Output
from meshwise.spec.words import some

WRITE = "Write the all_reduce into the backward of a torch.autograd.Function"


@dataclass(frozen=True)
class Back:
    """The gradient that reaches the output of one module call in the backward pass. It says how the gradient on the
    ranks is related to the gradient on one device."""

    module: str
    at: int
    is_part: bool
    factor: float


def by_hand_in_the_backward(evidence: Evidence) -> Cause | None:
    """Find a sum over ranks that is missing or done twice in the backward pass of a program that calls collectives
    itself. Return None if there is no sign of this."""
    actual, first = evidence.actual, evidence.first
    if first.step > 1 or not (actual.exchanges or actual.exchanges_backward) or not evidence.steps[1].peers:
        return None
    wrong = next((back for back in _backs(evidence) if back.is_part or not near(back.factor, 1)), None)
    calls = [output.module for output in evidence.steps[0].outputs if output.microbatch == 0]
    owner = owner_of(first.name)
    last = max((at for at, name in enumerate(calls) if name == owner), default=-1)
    if wrong is None or wrong.at < last:
        return _of_a_parameter(evidence)
    user = next((n for n in calls[wrong.at + 1 :] if not is_inside(wrong.module, n)), "")
    sums = evidence.sums_in_backward(user)
    text = f"{evidence.how_many()}, from {first.name} on; the gradient that comes back to"
    at, behind = evidence.where(wrong.module), evidence.where(user)
    if said := evidence.of_another_group(sums):
        return Cause(K.WRONG_GROUP, f"{text} {at} is the first that is wrong, in the backward of {behind}: {said}")
    text = f"{text} the outputs of {at}"
    lines = list(dict.fromkeys(each.within for each in sums))
    if wrong.is_part:
        return Cause(
            K.MISSING_REDUCTION,
            f"{text} is only a part on each rank, and the parts add up to that of one device. {behind}, which uses "
            "the outputs, returns only its own rank's part of the gradient: its backward lacks an all_reduce. "
            f"{WRITE} that its inputs go through.",
        )
    ranks = {evidence.plan.devices, evidence.plan.tensor, evidence.plan.context} - {1}
    size = next((n for n in ranks if near(wrong.factor, n) or near(wrong.factor, 1 / n)), None)
    if size is None:
        return None
    much = f"{size} times that of one device: equal gradients of the ranks are added up"
    much = much if wrong.factor > 1 else f"1/{size} of that of one device: it is divided by the number of ranks"
    there = f" Its backward adds up in {some(lines)}." if lines else ""
    return Cause(K.DOUBLED_REDUCTION, f"{text} is {much}, in the backward of {behind}.{there}")


def _of_a_parameter(evidence: Evidence) -> Cause | None:
    """Explain a wrong gradient of a parameter."""
    reference, actual = evidence.steps
    wrong = [d.name for d in evidence.faults("gradients") if d.name in actual.gradients]
    found = {name: weights_in(reference, actual, [name]) for name in wrong}
    owner = owner_of(evidence.first.name)
    text = f"the gradient that comes back to {evidence.where(owner)} is right; the gradient"
    parts = [name for name in wrong if _adds_up(found[name], len(actual.alike))]
    sums = evidence.sums_in_backward(owner)
    behind = [each for each in evidence.actual.exchanges if each.adds_up and not each.module]
    if said := evidence.of_another_group(behind if evidence.first.name in parts else sums):
        return Cause(K.WRONG_GROUP, f"{text} of {evidence.first.name} is not: {said}")
    if evidence.first.name in parts:
        return Cause(
            K.MISSING_REDUCTION,
            f"{text}s of {some(parts)} are only a part on each rank, and the parts add up to that of one device. Each "
            f"rank has the part of its slice, positions or samples. An all_reduce is missing. {WRITE} that the "
            "parameter goes through.",
        )
    weights = found.get(evidence.first.name)
    lines = list(dict.fromkeys(each.within for each in sums))
    if weights is None or weights.unique or not weights.one or not weights.plan or not lines:
        return None
    factor = sum(weights.plan) / sum(weights.one)
    if not near(factor, len(weights.ranks)):
        return None
    return Cause(
        K.DOUBLED_REDUCTION,
        f"{text} of {evidence.first.name} is {factor:.6g} times that of one device. In the backward {some(lines)} adds "
        "up equal gradients of the ranks: this is one all_reduce too many.",
    )


def _adds_up(found: RankWeights | None, alike: int) -> bool:
    """Return True if each rank seems to hold only a part of a parameter's gradient."""
    one = found.one if found is not None and found.unique else None
    return one is not None and alike > 1 and min(one) > 0 and near(sum(one), alike)


def _backs(evidence: Evidence) -> Iterator[Back]:
    """Yield the gradients that reach module outputs, in the order of the backward pass."""
    one, plan = evidence.steps
    peers = peers_in(plan)
    first = [output for output in one.outputs if output.microbatch == 0]
    counts = [len(part) for part in plan.samples[0] if part] if plan.samples else []
    for at, output in reversed(list(enumerate(first))):
        groups = [[_gradient(rank) for rank in ranks] for ranks in peers.get(output.key, [])]
        held = bool(groups) and all(rank.sketches for ranks in groups for rank in ranks)
        if not output.gradient or not held or len(counts) != len(groups):
            continue
        shares = [count / sum(counts) for count in counts]
        groups = [[_times(rank, share) for rank in ranks] for ranks, share in zip(groups, shares, strict=True)]
        back = _back(output.module, at, _gradient(output), groups)
        if back is not None:
            yield back


def _back(module: str, at: int, one: Output, groups: Groups) -> Back | None:
    each = [[ranks[number] for ranks in groups] for number in range(len(groups[0]))]
    whole = [output_difference(one, ranks) for ranks in each]
    if all(size is not None and size <= LIMIT for size in whole):
        return Back(module, at, False, 1.0)
    if len(groups) == 1 and any(size <= LIMIT for _, size in divided_outputs(one, groups[0])):
        return Back(module, at, False, 1.0)
    if adds_up_to(one, groups):
        return Back(module, at, True, 1.0)
    factors = [_factor(one, ranks) for ranks in (*each, *(groups if len(groups) == 1 else ()))]
    known = [factor for factor in factors if factor is not None]
    if known and all(near(factor, known[0]) for factor in known):
        return Back(module, at, False, known[0])
    fits = all(rank.shape[1:] == one.shape[1:] for ranks in groups for rank in ranks)  # False if a later dim is split
    return Back(module, at, False, 0.0) if fits and any(size is not None for size in whole) else None


def _factor(one: Output, ranks: Sequence[Output]) -> float | None:
    rows = [rank.sketches["0"] for rank in ranks if "0" in rank.sketches]
    sides = [(mine, theirs) for _, mine, theirs in divided_rows(one, ranks)]
    if "0" in one.sketches and len(rows) == len(ranks):
        sides.append((one.sketches["0"], torch.cat(rows)))
    solved = (solve(a.reshape(-1, 1), b.flatten()) for a, b in sides if a.shape == b.shape)
    return next((found[0][0] for found in solved if found is not None), None)


def _gradient(output: Output) -> Output:
    """Return a copy of `output` with its gradient in place of its value."""
    return replace(output, sketches=output.gradient)


def _times(output: Output, share: float) -> Output:
    scaled = {layout: rows * share for layout, rows in output.sketches.items() if layout != "unordered"}
    return replace(output, sketches=scaled)
