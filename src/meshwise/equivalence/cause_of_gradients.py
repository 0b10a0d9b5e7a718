"""Why gradients differ, when outputs and the loss do not: rules from the surest evidence to the weakest.

Where a wrong gradient stands in the backward tells much: what weighs or reduces wrongly is wrong from the loss on; what
is wrong inside a module leaves all right that lies behind it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor

from meshwise.equivalence.compare import NOISE, Difference
from meshwise.equivalence.evidence import (
    Cause,
    Evidence,
    called_after,
    inside,
    made_coarse,
    near,
    number,
    owner_of,
    scaled,
    some,
)
from meshwise.equivalence.prints import print_of
from meshwise.equivalence.sizes import LIMIT

Rule = Callable[[Difference, Evidence], Cause | None]


def gradient(first: Difference, seen: Evidence) -> Cause:
    """The cause of a first difference in gradients, or in their norm."""
    for rule in _RULES:
        cause = rule(first, seen)
        if cause is not None:
            return cause
    return Cause("backward", f"{_many(first, seen)}; {first.name} was the first to be ready.")


def _lacking(first: Difference, seen: Evidence) -> Cause | None:
    """No gradient at all: nobody reduced it, or the graph does not reach it."""
    lacking = first.facts.get("lacking")
    if lacking is None:
        return None
    names = [d.name for d in seen.faults("gradients", first.step) if d.facts.get("lacking") == lacking]
    if lacking == "one device":
        return Cause("backward", f"{some('parameter', names)}: a gradient under the plan, and none on one device.")
    if not _whole_modules(names, seen):
        return Cause("backward", f"the plan has no gradient of {some('parameter', names)}: frozen, detached or unused.")
    within = _common(names)
    order = [d.name for d in seen.of_kind("gradients", first.step) if inside(d.name, within)]
    beyond = [name for name in order[order.index(first.name) :] if name not in names]
    if beyond and (seen.made.parameters_divided or seen.made.accumulate > 1):
        text = f"the plan has no gradient of {some('parameter', names)}, and one of {beyond[0]}, which lies before it"
        return Cause("missing reduction", f"{text}: nobody reduced it.")
    return Cause("backward", f"no gradient comes to {owner_of(first.name) or 'the model'}: the graph is cut behind it.")


def _own_of_ranks(first: Difference, seen: Evidence) -> Cause | None:
    apart = [d.name for d in seen.faults("gradients", first.step) if "ranks apart" in d.facts]
    if not apart:
        return None
    names = some("gradient", apart)
    return Cause("missing reduction", f"ranks have each their own value of {names}, which should be one.")


def _between_backwards(first: Difference, seen: Evidence) -> Cause | None:
    """Gradients must lie untouched between the microbatches of a step."""
    for rank, micro, before, after, alike in seen.step(first.step)[1].touched:
        where = f"behind microbatch {micro + 1} on rank {rank}"
        if after == 0:
            return Cause("missing reduction", f"gradients are thrown away {where}, before the step.")
        if after < before:
            text = f"gradients are {'scaled' if alike else 'cut'} from norm {before:.3g} to {after:.3g} {where}"
            return Cause("clip norm", f"{text}, before the step: they are clipped each microbatch.")
    return None


def _one_factor(first: Difference, seen: Evidence) -> Cause | None:
    faults, count = seen.faults("gradients", first.step), seen.count("gradients", first.step)
    factors = [scaled(d) for d in faults]
    known = [f for f in factors if f is not None]
    if not known or len(known) < len(factors) or not all(near(f, known[0]) for f in known):
        return None
    factor, all_of_them = known[0], _all_wrong(first, seen)
    text = f"{len(faults)} of {count} gradients are {number(factor)} times those of one device"
    axes = {seen.ranks: "ranks", seen.made.shard: "shards", seen.made.data: "replicas"}
    for size, words in axes.items():
        if size > 1 and near(factor, size):
            return Cause("doubled reduction", f"{text}, the number of {words}: summed, and not divided.")
        if size > 1 and near(factor, 1 / size):
            return Cause("doubled reduction", f"{text}, one over the number of {words}: divided once too often.")
    if not all_of_them:
        return None
    for size in (seen.made.accumulate,):
        if size > 1 and (near(factor, size) or near(factor, 1 / size)):
            return Cause("loss weighting", f"{text}: the number of microbatches counts once too often or not at all.")
    power = abs(math.log2(abs(factor)))
    scale = ", a power of two, as a loss scale that is left in" if power >= 4 and near(power, round(power)) else ""
    return Cause("loss weighting", f"{text}: the same factor for each{scale}.")


def _mix(first: Difference, seen: Evidence) -> Cause | None:
    """Are the plan's gradients those of the microbatches, added up with other weights?"""
    weights = _weights_of_microbatches(first.step, seen)
    if not weights:
        return None
    absent = [k + 1 for k, weight in enumerate(weights) if abs(weight) <= 1e-6]
    count = len(weights)
    if absent:
        there = [k + 1 for k in range(count) if k + 1 not in absent]
        text = f"the gradients are those of microbatch {', '.join(map(str, there))} of {count}"
        return Cause("missing reduction", f"{text} alone; {some('microbatch', absent)} is not in them.")
    said = ", ".join(f"{weight:.6g}" for weight in weights)
    text = f"the gradients are those of {count} microbatches, which weigh {said} times what they should"
    one, _ = seen.step(first.step)
    shrunk = all(0 < a <= b * (1 + 1e-6) for a, b in pairwise(weights)) and weights[0] < 1
    if one.clipped and shrunk and near(weights[-1], 1):
        return Cause("clip norm", f"{text}: they are clipped each microbatch.")
    return Cause("loss weighting", f"{text}.")


def _weights_of_microbatches(step: int, seen: Evidence) -> list[float]:
    one, plan = seen.step(step)
    if len(one.parts) < 2:
        return []
    names = [n for n, g in one.gradients.items() if n in plan.gradients and plan.gradients[n].shape == g.shape]
    columns, wanted = [], []
    for name in names:
        parts = [part.get(name) for part in one.parts]
        size = max((float(p.norm()) for p in parts if p is not None), default=0.0)
        if size > 0:
            zero = torch.zeros_like(next(p for p in parts if p is not None))
            columns.append(torch.stack([zero if p is None else p for p in parts]).flatten(1).T / size)
            wanted.append(print_of(plan.gradients[name].double()).flatten() / size)
    return _solved(torch.cat(columns), torch.cat(wanted)) if columns else []


def _solved(columns: Tensor, wanted: Tensor) -> list[float]:
    """The weights with which columns add up to what is wanted; empty where they do not, or not with these alone."""
    if not bool(wanted.isfinite().all() and columns.isfinite().all()):
        return []
    if int(torch.linalg.matrix_rank(columns, rtol=1e-8)) < columns.shape[1] or columns.shape[0] <= columns.shape[1]:
        return []
    weights: Tensor = torch.linalg.lstsq(columns, wanted[:, None]).solution[:, 0]
    rest = float((columns @ weights - wanted).norm()) / max(float(wanted.norm()), 1e-300)
    return weights.tolist() if rest <= 1e3 * LIMIT else []


def _tied(first: Difference, seen: Evidence) -> Cause | None:
    tied = [group for group in seen.one.tied if first.name in group]
    everywhere = {name for group in seen.one.tied for name in group}
    if not tied or any(d.name not in everywhere for d in seen.faults("gradients", first.step)):
        return None
    return Cause("tied weight", f"{first.name} is shared by {len(tied[0])} modules, and its gradient differs.")


def _coarse(first: Difference, seen: Evidence) -> Cause | None:
    one, plan = seen.step(first.step)
    names = [d.name for d in seen.faults("gradients", first.step)]
    found = {made_coarse(one.gradients.get(n), plan.gradients.get(n)) for n in names}
    if not names or "" in found:
        return None
    dtypes = " or ".join(sorted(found))
    return Cause(
        "lower precision", f"every value of the {len(names)} gradients that differ is one that {dtypes} holds."
    )


def _drawn_anew(first: Difference, seen: Evidence) -> Cause | None:
    """A block that runs again draws the numbers of its first run, or its gradients are those of another function."""
    if not seen.step(first.step)[1].redrawn or seen.step(first.step)[0].redrawn:
        return None
    block = _block_of(first, seen)
    where = f"{block}, which runs again," if block else "a block that runs again"
    return Cause("dropout masks", f"outputs and loss are equal; in the backward {where} draws other random numbers.")


def _run_again(first: Difference, seen: Evidence) -> Cause | None:
    """All that lies behind a recomputed block is right: what its second run made is wrong."""
    if first.kind != "gradients" or _from_the_loss_on(first, seen):
        return None
    block = _block_of(first, seen)
    if block is None:
        return None
    text = f"what lies behind {block or 'the model'}, which runs again in the backward, has right ones"
    return Cause("backward", f"{_many(first, seen)}; {text}: its second run is the likely place.")


def _block_of(first: Difference, seen: Evidence) -> str | None:
    """The recomputed block that a gradient belongs to, or that is called next."""
    owner, again = owner_of(first.name), seen.plan.recomputed
    here = next((block for block in again if inside(owner, block)), None)
    return here if here is not None else next((b for b in _next_behind(first, seen) if b in again), None)


def _normalised(first: Difference, seen: Evidence) -> Cause | None:
    """Wrong from a batch norm on down to the start: its backward sums over the wrong samples."""
    if first.kind != "gradients" or _from_the_loss_on(first, seen):
        return None
    below = seen.of_kind("gradients", first.step)
    below = below[below.index(first) :]
    if not all(d.fault or _silent(d.name, first.step, seen) for d in below):
        return None
    for name in _next_behind(first, seen):
        kind = seen.comparison.modules.get(name, "")
        if "BatchNorm" in kind:
            text = f"outputs are equal; gradients are right down to {name} ({kind}), and wrong in all that lies before"
            return Cause("batch-norm statistics", f"{text}: its backward is that of another set of samples.")
    return None


def _weighed(first: Difference, seen: Evidence) -> Cause | None:
    """Ranks agree on gradients that are all wrong, and there is something that could be weighted wrongly."""
    if first.kind == "gradients" and not _all_wrong(first, seen):
        return None
    one, plan = seen.step(first.step)
    shares = [len(part) for micro in plan.samples for part in micro]
    if not one.weighed and len(set(shares)) < 2:
        return None
    why = "the loss gives a weight of its own" if one.weighed else "ranks have unequal shares"
    return Cause(
        "loss weighting",
        f"{_many(first, seen)}, ranks agree on them, and {why} ({', '.join(map(str, shares))} samples).",
    )


_RULES: tuple[Rule, ...] = (
    _lacking,
    _own_of_ranks,
    _between_backwards,
    _drawn_anew,
    _one_factor,
    _mix,
    _tied,
    _coarse,
    _run_again,
    _normalised,
    _weighed,
)


def _many(first: Difference, seen: Evidence) -> str:
    return f"{len(seen.faults('gradients', first.step))} of {seen.count('gradients', first.step)} gradients differ"


def _from_the_loss_on(first: Difference, seen: Evidence) -> bool:
    """Whether no gradient was right before the first wrong one."""
    of_kind = seen.of_kind("gradients", first.step)
    return not any(not _silent(d.name, first.step, seen) for d in of_kind[: of_kind.index(first)])


def _all_wrong(first: Difference, seen: Evidence) -> bool:
    """Whether every gradient that is more than rounding is wrong."""
    return all(d.fault or _silent(d.name, first.step, seen) for d in seen.of_kind("gradients", first.step))


def _silent(name: str, step: int, seen: Evidence) -> bool:
    gradients = seen.step(step)[0].gradients
    most = max((float(g.abs().max()) for g in gradients.values() if g.numel()), default=0.0)
    own = gradients.get(name)
    return own is not None and (not own.numel() or float(own.abs().max()) <= NOISE * most)


def _next_behind(first: Difference, seen: Evidence) -> list[str]:
    """Modules that the forward calls from the owner of a wrong gradient to the next owner of right ones."""
    one, _ = seen.step(first.step)
    right = {owner_of(d.name) for d in seen.of_kind("gradients", first.step) if not d.fault}
    found = []
    for name in called_after(owner_of(first.name), one):
        found.append(name)
        if name in right:
            break
    return found


def _whole_modules(names: list[str], seen: Evidence) -> bool:
    """Whether of each module all parameters are among `names`, or none."""
    owners = {owner_of(name) for name in names}
    return all(name in names for name in seen.one.steps[0].gradients if owner_of(name) in owners)


def _common(names: list[str]) -> str:
    """The smallest module that holds all modules of `names` and their neighbours."""
    parts = [owner_of(owner_of(name)).split(".") for name in names]
    shared = []
    for level in zip(*parts, strict=False):
        if len(set(level)) > 1:
            break
        shared.append(level[0])
    return ".".join(shared)
