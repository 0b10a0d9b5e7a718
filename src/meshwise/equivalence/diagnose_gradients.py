"""Why gradients differ, when outputs and the loss do not: rules from the surest evidence to the weakest.

Where a wrong gradient stands in the backward tells much: what weighs or reduces wrongly is wrong from the loss on; what
is wrong is_inside a module leaves all right that lies behind it.
"""

from __future__ import annotations

import math
from itertools import pairwise, takewhile

import torch
from torch import Tensor

from meshwise.equivalence.causes import Cause
from meshwise.equivalence.causes import CauseKind as K
from meshwise.equivalence.compare import NOISE, Difference
from meshwise.equivalence.evidence import (
    Evidence,
    Rule,
    called_after,
    first_few,
    gradient_factor,
    how_many,
    is_inside,
    near,
    number_text,
    owner_of,
    precision_lost,
    ranks_differ,
    says,
)
from meshwise.equivalence.sketches import sketch
from meshwise.equivalence.tolerance import LIMIT
from meshwise.spec.plan import Plan


def _no_gradient(first: Difference, evidence: Evidence) -> Cause | None:
    """No gradient at all: nobody reduced it, or the graph does not reach it."""
    lacking = first.facts.get("lacking")
    if lacking is None:
        return None
    names = [d.name for d in evidence.faults("gradients", first.step) if d.facts.get("lacking") == lacking]
    few = first_few("parameter", names)
    if lacking == "one device":
        return Cause(K.BACKWARD, f"{few}: a gradient under the plan, and none on one device.")
    if not _whole_modules(names, evidence):
        return Cause(K.BACKWARD, f"the plan has no gradient of {few}: frozen, detached or unused.")
    within = _common_module(names)
    order = [d.name for d in evidence.of_kind("gradients", first.step) if is_inside(d.name, within)]
    beyond = [name for name in order[order.index(first.name) :] if name not in names]
    if beyond and (evidence.plan.shard > 1 or evidence.plan.accumulate > 1):
        text = f"the plan has no gradient of {few}, and one of {beyond[0]}, which lies before it"
        return Cause(K.MISSING_REDUCTION, f"{text}: nobody reduced it.")
    owner = owner_of(first.name) or "the model"
    return Cause(K.BACKWARD, f"no gradient reaches {owner}: the graph is cut behind it.")


def _not_reduced(first: Difference, evidence: Evidence) -> Cause | None:
    names = [d.name for d in evidence.faults("gradients", first.step) if ranks_differ(d, evidence)]
    text = f"ranks have different values of {first_few('gradient', names)}, which should be one."
    return Cause(K.MISSING_REDUCTION, text) if names else None


def _modified_between_backwards(first: Difference, evidence: Evidence) -> Cause | None:
    """Gradients must not be modified between the microbatches of a step."""
    for rank, micro, before, after, alike in evidence.step(first.step)[1].modified_between_backwards:
        where = f"behind microbatch {micro + 1} on rank {rank}"
        if after == 0:
            return Cause(K.MISSING_REDUCTION, f"gradients are thrown away {where}, before the step.")
        if after < before:
            text = f"gradients are {'scaled' if alike else 'cut'} from norm {before:.3g} to {after:.3g} {where}"
            return Cause(K.CLIP_NORM, f"{text}, before the step: they are clipped each microbatch.")
    return None


def _one_factor(first: Difference, evidence: Evidence) -> Cause | None:
    """Are all wrong gradients those of one device times one number?"""
    faults, plan = evidence.faults("gradients", first.step), evidence.plan
    factors = [gradient_factor(d) for d in faults]
    factor = factors[0] if factors else None
    if factor is None or not all(f is not None and near(f, factor) for f in factors):
        return None
    text = f"{how_many(first, evidence)}, and are {number_text(factor)} times those of one device"
    for size, words in {plan.devices: "ranks", plan.shard: "shards", plan.data: "replicas"}.items():
        if size > 1 and near(factor, size):
            return Cause(K.DOUBLED_REDUCTION, f"{text}, the number of {words}: summed, and not divided.")
        if size > 1 and near(factor, 1 / size):
            text += f", one over the number of {words}: divided once too often."
            return Cause(K.DOUBLED_REDUCTION, text)
    return Cause(K.LOSS_WEIGHTING, f"{text}: {_meaning(factor, plan)}.") if _all_wrong(first, evidence) else None


def _meaning(factor: float, plan: Plan) -> str:
    if plan.accumulate > 1 and any(near(factor, size) for size in (plan.accumulate, 1 / plan.accumulate)):
        return "the number of microbatches counts once too often or not at all"
    power = abs(math.log2(abs(factor)))
    scale = ", a power of two, as a loss scale that is not removed" if power >= 4 and near(power, round(power)) else ""
    return f"the same factor for each{scale}"


def _other_weights_of_microbatches(first: Difference, evidence: Evidence) -> Cause | None:
    """Are the plan's gradients those of the microbatches, added up with other weights?"""
    weights = _weights_of_microbatches(first.step, evidence)
    if not weights:
        return None
    absent = [k + 1 for k, weight in enumerate(weights) if abs(weight) <= 1e-6]
    count = len(weights)
    if absent:
        there = [k + 1 for k in range(count) if k + 1 not in absent]
        text = f"the gradients are those of microbatch {', '.join(map(str, there))} of {count}"
        return Cause(K.MISSING_REDUCTION, f"{text} alone; {first_few('microbatch', absent)} is not in them.")
    shown = ", ".join(f"{weight:.6g}" for weight in weights)
    text = f"the gradients are those of {count} microbatches, which weigh {shown} times what they should"
    reference, _ = evidence.step(first.step)
    shrunk = all(0 < a <= b * (1 + 1e-6) for a, b in pairwise(weights)) and weights[0] < 1
    if reference.clipped_gradients and shrunk and near(weights[-1], 1):
        return Cause(K.CLIP_NORM, f"{text}: they are clipped each microbatch.")
    return Cause(K.LOSS_WEIGHTING, f"{text}.")


def _weights_of_microbatches(step: int, evidence: Evidence) -> list[float]:
    reference, actual = evidence.step(step)
    if len(reference.microbatch_gradients) < 2:
        return []
    columns, wanted = [], []
    for name, gradient in reference.gradients.items():
        parts = [part.get(name) for part in reference.microbatch_gradients]
        size = max((float(p.norm()) for p in parts if p is not None), default=0.0)
        if size > 0 and name in actual.gradients and actual.gradients[name].shape == gradient.shape:
            zero = torch.zeros_like(next(p for p in parts if p is not None))
            columns.append(torch.stack([zero if p is None else p for p in parts]).flatten(1).T / size)
            wanted.append(sketch(actual.gradients[name].double()).flatten() / size)
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


def _only_tied_weights(first: Difference, evidence: Evidence) -> Cause | None:
    tied = [group for group in evidence.reference.tied if first.name in group]
    everywhere = {name for group in evidence.reference.tied for name in group}
    if not tied or any(d.name not in everywhere for d in evidence.faults("gradients", first.step)):
        return None
    return Cause(K.TIED_WEIGHT, f"{first.name} is shared by {len(tied[0])} modules, and its gradient differs.")


def _lower_precision(first: Difference, evidence: Evidence) -> Cause | None:
    reference, actual = evidence.step(first.step)
    names = [d.name for d in evidence.faults("gradients", first.step)]
    found = {precision_lost(reference.gradients.get(n), actual.gradients.get(n)) for n in names}
    if not names or "" in found:
        return None
    dtypes = " or ".join(sorted(found))
    text = f"every value of the {len(names)} gradients that differ is one that {dtypes} holds."
    return Cause(K.LOWER_PRECISION, text)


def _random_recompute(first: Difference, evidence: Evidence) -> Cause | None:
    """A block that runs again draws the numbers of its first run, or its gradients are those of another function."""
    if not evidence.step(first.step)[1].rng_mismatch or evidence.step(first.step)[0].rng_mismatch:
        return None
    block = _block_of(first, evidence)
    where = f"{block}, which is recomputed," if block else "a recomputed block"
    return Cause(K.DROPOUT, f"outputs and loss are equal; in the backward {where} draws other random numbers.")


def _wrong_recompute(first: Difference, evidence: Evidence) -> Cause | None:
    """All that lies behind a recomputed block is right: what its second run computed is wrong."""
    if first.kind != "gradients" or _from_the_loss_on(first, evidence):
        return None
    block = _block_of(first, evidence)
    if block is None:
        return None
    text = f"what lies behind {block or 'the model'}, which is recomputed in the backward, has right ones"
    return Cause(K.BACKWARD, f"{how_many(first, evidence)}; {text}: its second run is the likely place.")


def _block_of(first: Difference, evidence: Evidence) -> str | None:
    """The recomputed block that a gradient belongs to, or that is called next."""
    owner, again = owner_of(first.name), evidence.actual.recomputed_modules
    here = next((block for block in again if is_inside(owner, block)), None)
    return here if here is not None else next((b for b in _called_next(first, evidence) if b in again), None)


def _wrong_from_batch_norm_on(first: Difference, evidence: Evidence) -> Cause | None:
    """Wrong from a batch norm on down to the start: its backward sums over the wrong samples."""
    if first.kind != "gradients" or _from_the_loss_on(first, evidence):
        return None
    below = evidence.of_kind("gradients", first.step)
    below = below[below.index(first) :]
    if not all(d.fault or _is_noise(d.name, first.step, evidence) for d in below):
        return None
    for name in _called_next(first, evidence):
        kind = evidence.comparison.modules.get(name, "")
        if "BatchNorm" in kind:
            text = f"outputs are equal; gradients are right down to {name} ({kind}), and wrong in all that lies before"
            return Cause(K.BATCH_NORM, f"{text}: its backward is that of another set of samples.")
    return None


def _other_weights(first: Difference, evidence: Evidence) -> Cause | None:
    """Ranks agree on gradients that are all wrong, and there is something that could be weighted wrongly."""
    if first.kind == "gradients" and not _all_wrong(first, evidence):
        return None
    reference, actual = evidence.step(first.step)
    counts = [len(part) for micro in actual.samples for part in micro]
    if not reference.loss_has_weight and len(set(counts)) < 2:
        return None
    why = "the loss gives a weight of its own" if reference.loss_has_weight else "ranks have unequal batches"
    text = f"{how_many(first, evidence)}, ranks agree on them, and {why} ({', '.join(map(str, counts))} samples)."
    return Cause(K.LOSS_WEIGHTING, text)


GRADIENT_RULES: tuple[Rule, ...] = (
    _no_gradient,
    _not_reduced,
    _modified_between_backwards,
    _random_recompute,
    _one_factor,
    _other_weights_of_microbatches,
    _only_tied_weights,
    _lower_precision,
    _wrong_recompute,
    _wrong_from_batch_norm_on,
    _other_weights,
    says(K.BACKWARD, "{how_many}; {name} was the first to be ready."),
)


def _from_the_loss_on(first: Difference, evidence: Evidence) -> bool:
    """Whether no gradient was right before the first wrong one."""
    of_kind = evidence.of_kind("gradients", first.step)
    return not any(not _is_noise(d.name, first.step, evidence) for d in of_kind[: of_kind.index(first)])


def _all_wrong(first: Difference, evidence: Evidence) -> bool:
    """Whether every gradient that is more than rounding is wrong."""
    return all(d.fault or _is_noise(d.name, first.step, evidence) for d in evidence.of_kind("gradients", first.step))


def _is_noise(name: str, step: int, evidence: Evidence) -> bool:
    gradients = evidence.step(step)[0].gradients
    most = max((float(g.abs().max()) for g in gradients.values() if g.numel()), default=0.0)
    own = gradients.get(name)
    return own is not None and (not own.numel() or float(own.abs().max()) <= NOISE * most)


def _called_next(first: Difference, evidence: Evidence) -> list[str]:
    """Modules that the forward calls from the owner of a wrong gradient to the next owner of right ones."""
    right = {owner_of(d.name) for d in evidence.of_kind("gradients", first.step) if not d.fault}
    called = list(called_after(owner_of(first.name), evidence.step(first.step)[0]))
    return called[: next((at + 1 for at, name in enumerate(called) if name in right), None)]


def _whole_modules(names: list[str], evidence: Evidence) -> bool:
    """Whether of each module all parameters are among `names`, or none."""
    owners = {owner_of(name) for name in names}
    return all(name in names for name in evidence.reference.steps[0].gradients if owner_of(name) in owners)


def _common_module(names: list[str]) -> str:
    """The smallest module that holds all modules of `names` and their neighbours."""
    parts = [owner_of(owner_of(name)).split(".") for name in names]
    shared = takewhile(lambda level: len(set(level)) == 1, zip(*parts, strict=False))
    return ".".join(level[0] for level in shared)
