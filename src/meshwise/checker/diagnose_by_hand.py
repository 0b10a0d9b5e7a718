"""Diagnose mistakes in what ranks exchange by hand, forward and backward.

By hand means with torch.distributed collectives that the program itself calls.

In a forward pass, the evidence is the outputs of modules. In a backward pass, it is the gradients that reach these
outputs: ranks with the same samples should get the whole gradient. Parts of it, or a multiple, come from the module
that uses the output. If all are right, the gradient of a parameter is itself only a part.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch

from meshwise.checker.causes import Cause
from meshwise.checker.causes import CauseKind as K
from meshwise.checker.difference import LIMIT
from meshwise.checker.evidence import Evidence, is_inside, near, owner_of
from meshwise.checker.exchanges import places_of
from meshwise.checker.outputs import Groups, adds_up_to, divided_outputs, divided_rows, output_difference, peers_in
from meshwise.checker.rank_weights import solve, weights_in
from meshwise.checker.sketches import row_sketches
from meshwise.checker.trace import Output
from meshwise.spec.words import some

WRITE = "Write the all_reduce into the backward of a torch.autograd.Function"

# The forward pass.


def sum_by_hand_is_missing(evidence: Evidence) -> str:
    """Return a sentence if the outputs of the first wrong module lack a sum over the ranks."""
    first, where = evidence.first, evidence.where(evidence.first.name)
    if first.facts.get("parts") == "a sum":
        text = f"the ranks have the same samples, and their outputs of {where} add up to that of one device"
        return f"{text}. An all_reduce of the output is missing."
    before = [d for d in evidence.of_kind("module outputs") if d.facts["at"] < first.facts["at"]]
    follows_features = bool(before) and before[-1].facts.get("parts") == "features"
    if evidence.exchanges(first.name, sums=True):
        return ""
    if first.facts.get("parts") == "positions" and follows_features:
        text = f"each rank passes part of the features to {where}, which returns part of the positions"
        return f"{text}: a reduce_scatter or an all_reduce is missing."
    parts = some(_divided_by_hand(evidence, first.name))
    lines = places_of(evidence.exchanges(first.name))
    there = f"; it exchanges in {lines}" if lines else ""
    text = f"each rank works with its own part of {parts}, and {where} adds nothing up over the ranks{there}"
    return f"{text}: an all_reduce of its result is missing." if parts else ""


def _divided_by_hand(evidence: Evidence, module: str) -> list[str]:
    """Return the names of the parameters in `module` that the program itself divides over ranks."""
    found: dict[str, list[list[tuple[int, int]]]] = {}
    for (_, name), box in sorted(evidence.steps[1].own_boxes.items()):
        if is_inside(name, module):
            found.setdefault(name, []).append(box)
    return [name for name, boxes in found.items() if len(boxes) > 1 and _are_apart(boxes)]


def _are_apart(boxes: list[list[tuple[int, int]]]) -> bool:
    """Return whether the boxes lie one after another along a dimension."""
    return all(boxes) and any(all(a[1] <= b[0] for a, b in pairwise(dim)) for dim in zip(*boxes, strict=True))


def over_another_group(evidence: Evidence) -> str:
    """Return a sentence if the first wrong module sums over the wrong process group."""
    said = evidence.of_another_group(evidence.exchanges(evidence.first.name, sums=True))
    return f"{evidence.where(evidence.first.name)} is the first whose outputs differ; {said}" if said else ""


def counted_by_ranks(evidence: Evidence) -> str:
    """Return a sentence if outputs are multiplied by the number of ranks, or have a bias of each rank."""
    ranks_of = [[output] for output in evidence.steps[1].outputs if output.key == _call(evidence)]
    found = None if evidence.ranks_differ() else next(_scaled(evidence, ranks_of), None)
    if found is None:
        return ""
    factor, added, bias = found
    lines = places_of(evidence.exchanges(evidence.first.name, sums=True))
    there = f" in {lines}" if lines else ""
    text = f"the outputs of {evidence.where(evidence.first.name)} are"
    if near(factor, 1):
        text = f"{text} those of one device and {added:.6g} times {bias}: every rank adds it before the sum{there}"
        counted = added > LIMIT and evidence.of_ranks(added + 1)
        return f"{text}. Add it after the sum, or on one rank only." if counted else ""
    times = evidence.of_ranks(factor)
    apart = f", apart from {bias}," if bias else ""
    mean = f"the sum{there} is divided by the number of ranks, or is a mean"
    why = mean if factor < 1 else f"equal values of the ranks are added up{there}"
    return f"{text}{apart} {times} those of one device: {why}." if times else ""


def ranks_have_parts(evidence: Evidence) -> str:
    """Return a sentence if ranks with the same samples get different outputs."""
    if not evidence.first.facts.get("first rank", 0.0) > LIMIT:
        return ""
    text = f"{evidence.where(evidence.first.name)} returns different outputs on ranks that have the same samples"
    peers = peers_in(evidence.steps[1]).get(_call(evidence), [])
    for factor, added, bias in _scaled(evidence, peers):
        if near(factor, 1) and near(added, len(peers[0]) - 1):
            text = f"{text}: without {bias}, which every rank adds, the outputs add up to that of one device"
            return f"{text}. An all_reduce is missing before {bias} is added."
    return f"{text}: a sum lacks a part."


def _call(evidence: Evidence) -> tuple[int, str, int]:
    """Return the key (microbatch, module, call number) of the first call with differing outputs."""
    facts = evidence.first.facts
    return facts["microbatch"] - 1, evidence.first.name, facts["call"] - 1


def _scaled(evidence: Evidence, groups: Groups) -> Iterator[tuple[float, float, str]]:
    """Yield (factor, added, bias) if the outputs are `factor` times one device's outputs, plus `added` times a bias."""
    key = _call(evidence)
    one = next((output for output in evidence.steps[0].outputs if output.key == key), None)
    if one is None or not groups or any("0" not in each.sketches for ranks in (*groups, [one]) for each in ranks):
        return
    rows = torch.cat([torch.stack([rank.sketches["0"] for rank in ranks]).sum(0) for ranks in groups])
    if len(one.sketches["0"]) != len(rows):
        return
    biases = {
        name: p
        for name, p in evidence.reference.initial_parameters.items()
        if owner_of(name) == one.module and p.shape == one.shape[-1:] and evidence.first.step == 1
    }
    shape = (1, *one.shape[1:]) if one.shape[0] == len(rows) else (1, one.shape[0] // len(rows), *one.shape[1:])
    columns = [one.sketches["0"].flatten()]
    for bias, value in (("", None), *biases.items()):
        added = [] if value is None else [row_sketches(value.expand(shape)).expand_as(rows).flatten()]
        found = solve(torch.stack(columns + added, 1), rows.flatten())
        if found is not None and found[1]:
            yield found[0][0], found[0][1] if added else 0.0, bias


# The backward pass.


@dataclass(frozen=True)
class Back:
    """How the gradient that reaches the output of a module call is related to that of one device."""

    module: str
    at: int
    is_part: bool
    factor: float


def by_hand_in_the_backward(evidence: Evidence) -> Cause | None:
    """Explain wrong gradients by a sum over ranks that the backward lacks or makes twice."""
    actual, first = evidence.actual, evidence.first
    if first.step > 1 or not (actual.exchanges or actual.exchanges_backward) or not evidence.steps[1].peers:
        return None
    wrong = next((back for back in _backs(evidence) if back.is_part or not near(back.factor, 1)), None)
    calls = evidence.calls()
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
    if wrong.is_part:
        text = f"{text} is only a part on each rank: the backward of {behind} lacks an all_reduce"
        return Cause(K.MISSING_REDUCTION, f"{text}. {WRITE} that its inputs go through.")
    times = evidence.of_ranks(wrong.factor)
    why = "equal gradients of the ranks are added up" if wrong.factor > 1 else "it is divided by the number of ranks"
    there = f" Its backward adds up in {places_of(sums)}." if sums else ""
    text = f"{text} is {times} that of one device: {why}, in the backward of {behind}.{there}"
    return Cause(K.DOUBLED_REDUCTION, text) if times else None


def _of_a_parameter(evidence: Evidence) -> Cause | None:
    """Explain a wrong gradient of a parameter."""
    reference, actual = evidence.steps
    first, owner, alike = evidence.first.name, owner_of(evidence.first.name), len(actual.alike)
    wrong = [d.name for d in evidence.faults("gradients") if d.name in actual.gradients]
    found = {name: weights_in(reference, actual, [name]) for name in wrong}
    ones = {name: each.one for name, each in found.items() if each is not None and each.unique and each.one}
    text = f"the gradient that comes back to {evidence.where(owner)} is right; the gradient"
    parts = [name for name, one in ones.items() if alike > 1 and min(one) > 0 and near(sum(one), alike)]
    sums = evidence.sums_in_backward(owner)
    behind = [each for each in evidence.actual.exchanges if each.adds_up and not each.module]
    if said := evidence.of_another_group(behind if first in parts else sums):
        return Cause(K.WRONG_GROUP, f"{text} of {first} is not: {said}")
    if first in parts:
        text = f"{text}s of {some(parts)} are only a part on each rank"
        return Cause(K.MISSING_REDUCTION, f"{text}. {WRITE} that the parameter goes through.")
    weights = found.get(first)
    if weights is None or weights.unique or not weights.one or not weights.plan or not sums:
        return None
    factor = sum(weights.plan) / sum(weights.one)
    text = f"{text} of {first} is {factor:.6g} times that of one device"
    text = f"{text}: {places_of(sums)} adds up equal gradients, which is one sum too many."
    return Cause(K.DOUBLED_REDUCTION, text) if near(factor, len(weights.ranks)) else None


def _backs(evidence: Evidence) -> Iterator[Back]:
    """Yield the gradients that reach module outputs, in the order of the backward pass."""
    one, plan = evidence.steps
    peers = peers_in(plan)
    first = [output for output in one.outputs if output.microbatch == 0]
    counts = [len(part) for part in plan.samples[0] if part] if plan.samples else []
    for at, output in reversed(list(enumerate(first))):
        groups = peers.get(output.key, [])
        held = bool(groups) and all(rank.gradient for ranks in groups for rank in ranks)
        if not output.gradient or not held or len(counts) != len(groups):
            continue
        shares = [count / sum(counts) for count in counts]
        groups = [[_gradient(rank, share) for rank in ranks] for ranks, share in zip(groups, shares, strict=True)]
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


def _gradient(output: Output, share: float = 1.0) -> Output:
    """Return a copy of `output` with `share` times its gradient in place of its value."""
    scaled = {layout: rows * share for layout, rows in output.gradient.items() if layout != "unordered"}
    return replace(output, sketches=scaled)


# Between the two.


def without_a_backward(evidence: Evidence) -> Cause | None:
    """Explain a wrong gradient, which no weights of the ranks give, by a collective in a forward."""
    solved = weights_in(*evidence.steps, [evidence.first.name])
    if solved is None or solved.one:
        return None
    owner = owner_of(evidence.first.name)
    module = next((name for name in (owner, *_called_next(evidence)) if evidence.exchanges(name)), None)
    if module is None:
        return None
    text = f"{evidence.how_many()}, from {evidence.first.name} on; no weights of the ranks' own gradients give it."
    text = f"{text} {evidence.where(module)} exchanges by hand in"
    back = {each.function for each in evidence.actual.exchanges_backward}
    found = evidence.exchanges(module, sums=False if evidence.steps[1].peers else None)
    lost = [each for each in found if not each.function or each.function not in back]
    if lost:
        text = f"{text} {places_of(lost)}, but its backward has no collective: no gradient comes back"
        return Cause(K.MISSING_REDUCTION, f"{text}. {WRITE}.")
    return Cause(K.BACKWARD, f"{text} {places_of(evidence.exchanges(module))}: look at the backward of that.")


def _called_next(evidence: Evidence) -> list[str]:
    """Return the modules that are called after that of the first wrong gradient."""
    owner, names = owner_of(evidence.first.name), evidence.calls()
    last = max((at for at, name in enumerate(names) if name == owner), default=len(names))
    called = [name for name in names[last + 1 :] if not is_inside(owner, name)]
    right = {owner_of(d.name) for d in evidence.of_kind("gradients") if not d.fault}
    return called[: next((at + 1 for at, name in enumerate(called) if name in right), None)]
