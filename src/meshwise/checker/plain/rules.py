"""Name the first cause that holds in a plain script's step.

The causes stand in the order of their evidence. Tested in tests/checker/test_plain_scripts.py.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from meshwise.checker.diagnose_weights import line_of
from meshwise.checker.difference import LIMIT
from meshwise.checker.finding import Finding
from meshwise.checker.loss_numbers import Joined, joined
from meshwise.checker.plain.counts import ALIKE
from meshwise.checker.plain.steps import At, among, are_means, differ_by_rank, far_apart, total, weights_of
from meshwise.checker.rank_weights import shown as weights_text
from meshwise.checker.sketches import pieces
from meshwise.workers.divergence import ADVICE

MEANS = "DistributedDataParallel takes the mean over the ranks: the loss of a rank must be a mean."
COUNTS = (
    "Divide a rank's sum by the count of all ranks and multiply by their number, or mw.backward(loss, weight=count)."
)
OF_TRAINER = (
    "Divide a sum by num_items_in_batch, in compute_loss_func= or in the model's forward. If the forward has **kwargs "
    "and the loss is a mean over equally many items on each rank, set accepts_loss_kwargs = False in the model's class."
)
REDUCE = "Call the DistributedDataParallel, and run the last backward of a step outside of no_sync()."
HOOK = "a hook changes each rank's gradient before the mean."
AFTER = "Change the gradients after the backward."
WHOLE_BATCH = "Gather what it is computed from, with its gradient, or sum its parts over the ranks."
DIVERGED, UNKNOWN = "ranks diverged", "cause unknown"
Hit = tuple[float, Finding] | None
"""How far the values are apart on which a finding rests, and the finding."""


def _diverged(at: At) -> Hit:
    """Name a rank that steps with another batch of its loop than rank 0."""
    first, *others = ([each and each[1:] for each in step.batches] for step in at.ranks)
    for rank, batches in enumerate(others, 1):
        pairs = zip(first, batches, strict=False)
        if len(first) != len(batches) or any(a != b for a, b in pairs if a and b):
            mine, its = (", ".join(str(each[1] + 1) for each in side if each) for side in (first, batches))
            said = f"rank 0 steps with batch {mine} of its loop and rank {rank} with batch {its}."
            return float("inf"), at.says(DIVERGED, said, *at.ranks[rank].places, instead=ADVICE)
    return None


def _rates(at: At) -> Hit:
    """Name a setting of the optimizer that differs between ranks, such as its learning rate."""
    for groups in zip(*(step.settings for step in at.ranks), strict=False):
        for key in groups[0]:
            values = [group.get(key, 0.0) for group in groups]
            far = (max(values) - min(values)) / max(*map(abs, values), 1e-300)
            if far > LIMIT:
                kind = f"{'learning rate' if key == 'lr' else key} of one rank"
                said = f"it is {', '.join(f'{value:.6g}' for value in values)} on the ranks."
                return far, at.says(kind, said, at.ranks[0].places[2], instead=ALIKE)
    return None


def _starts_apart(at: At) -> Hit:
    """Name a parameter that ranks have with other values as the step begins."""
    first, hit = at.ranks[0], among([step.starts for step in at.ranks], at.trained - at.joined)
    if hit is None:
        return None
    size, name = hit
    said, last = f"the ranks begin with other values of {name}, by {size:.2g}", at.last_step_of(name)
    if last is None:
        kind, said = "other start values", f"{said}."
        instead = "Start all ranks from the values of rank 0: DistributedDataParallel sends them."
    elif not all(name in step.parameters for step in last.ranks) or among([s.parameters for s in last.ranks], [name]):
        kind, said = "an update of one rank", f"{said}, as after step {last.number}."
        instead = "Send what a rank has updated to all others after each step."
    else:
        kind, said = "changed outside of the step", f"{said}, and were equal after step {last.number}."
        instead = "Change parameters on all ranks alike."
    return size, at.says(kind, said, *first.places, instead=instead)


def _other_state(at: At) -> Hit:
    """Name a parameter that no optimizer has, or a buffer, that differs as the forward begins."""
    first = at.ranks[0]
    hit = among([step.state for step in at.ranks], first.state.keys() - at.trained)
    if hit is None:
        return None
    said = f"the ranks have other values of {hit[1]}, by {hit[0]:.2g}, which no optimizer updates."
    instead = "Send it from rank 0 once, and update it from values that are alike on all ranks."
    return hit[0], at.says("other state of a rank", said, *first.places, instead=instead)


def _not_reduced(at: At) -> Hit:
    hit = among([step.gradients for step in at.ranks], at.apart - at.joined)
    if hit is None:
        return None
    first = at.ranks[0]
    said = f"the ranks step with other gradients of {hit[1]}{f': {first.unreduced}' if first.unreduced else ''}."
    return hit[0], at.says("gradients not reduced", said, *first.places, instead=REDUCE)


def _clips(at: At) -> Hit:
    for clips in zip(*(step.clips for step in at.ranks), strict=False):
        norms = [norm for _, norm in clips]
        if max(norms) - min(norms) > LIMIT * max(norms):
            said = f"the ranks clip gradients of the norms {', '.join(f'{norm:.4g}' for norm in norms)}."
            instead = "Clip once, after the last backward of a step (accelerate: if accelerator.sync_gradients)."
            far = (max(norms) - min(norms)) / max(norms)
            return far, at.says("clipping before the reduction", said, clips[0][0], instead=instead)
    return None


def _no_owner(at: At) -> Hit:
    """Name a parameter that one process updates and no rank, or the other way round."""
    one, many = at.one.gradients.keys(), at.many.keys()
    if not at.one.places[2] or one == many:
        return None
    where = at.ranks[0].places
    kind, said = "other gradients", f"one process has no gradient of {min(many - one, default='')}."
    if one - many:
        kind, said = "a parameter that no rank updates", f"no rank has a gradient of {min(one - many)}."
    return float("inf"), at.says(kind, said, *where)


def _gradients(at: At) -> Hit:
    """Name the cause of gradients that are other than those of one process."""
    if hit := far_apart(at.one.before_clipping.gradients, at.many):
        return hit[0], next(_causes(at, *hit))
    clipped = far_apart(at.one.gradients, {k: g for s in reversed(at.ranks) for k, g in s.gradients.items()})
    if clipped is None:
        return None
    said = f"the gradient of {clipped[1]} differs by {clipped[0]:.2g} after it is clipped, and not before."
    return clipped[0], at.says("clipping of a part", said, *(place for place, _ in at.ranks[0].clips))


def _causes(at: At, size: float, name: str) -> Iterator[Finding]:
    """Yield what may be the cause of other gradients, the likeliest first."""
    first, many = at.ranks[0], at.many
    where: tuple[str, ...] = (first.places[1], first.places[0])
    since = "; the steps before are equal" * (at.before is not None)
    weights = weights_of(at, total(at.one.own))
    reduced = weights_of(at, {k: pieces(g) for k, g in many.items()})
    if factor := _factor(at.one.before_clipping.gradients, many):
        said = f"every gradient is {factor:.6g} times that of one process on the same samples{since}."
        if first.reduced_at and weights is not None and are_means(at, weights):
            yield at.says("changed in the reduction", said, *first.reduced_at, *where)
        instead = OF_TRAINER if first.by_trainer else MEANS
        yield at.says("gradient times a number", said, *where, instead=instead)
    said = f"the gradient of {name} differs by {size:.2g}{since}"
    mean = statistics.fmean(step.loss for step in at.ranks)
    loss = at.one.loss
    losses = f"the mean of the ranks' losses is {mean:.6g}, but one process has {loss:.6g}"
    number = _no_mean(at)
    yield from _by_weights(at, said, losses, number, weights, reduced, where)
    if number is not None:
        said += f"; {losses}. {line_of(number)} is {number.shown}:"
        said += " neither a mean nor a sum of the ranks' values."
        where = (number.place, *where)
        yield at.says("a statistic of the rank's own batch", said, *where, instead=WHOLE_BATCH)
    if abs(mean - loss) <= LIMIT * max(abs(loss), abs(mean)):
        said += ", though the losses agree"
        if first.hooks:
            yield at.says("a hook before the reduction", f"{said}: {HOOK}", *first.hooks, instead=AFTER)
        if first.exchanges:
            said += f". {first.exchanges[0]} exchanges what the loss is made of,"
            said += " and may give back no gradient"
        yield at.says("other gradients", f"{said}.", *first.exchanges[:1], *where)
    if not any(at.one.own):
        said += f"; {losses}: means over different counts (tokens, samples)."
        instead = OF_TRAINER if first.by_trainer else COUNTS
        yield at.says("mean over unequal counts", said, *where, instead=instead)
    yield at.says(UNKNOWN, f"{said}; {losses}.", *where)


def _by_weights(
    at: At,
    said: str,
    losses: str,
    number: Joined | None,
    weights: list[float] | None,
    reduced: list[float] | None,
    where: tuple[str, ...],
) -> Iterator[Finding]:
    """Yield what the weights tell with which the gradients of the ranks' own losses add up, there and here."""
    first = at.ranks[0]
    if weights is not None and reduced is None:
        said += ", though the ranks' own gradients add up to it: "
        if first.hooks:
            yield at.says("a hook before the reduction", said + HOOK, *first.hooks, instead=AFTER)
        said += "the reduction changes them."
        yield at.says("changed in the reduction", said, *first.reduced_at, *where)
    unequal = weights is not None and differ_by_rank(at, weights)
    if unequal or (number is not None and number.is_mean_of_its_own):
        said += f"; {losses}"
        if weights is not None and reduced is not None:
            said += f": the ranks' gradients weigh {weights_text(weights)} there,"
            said += f" and {weights_text(reduced)} here"
        if number is not None:
            said += f". {line_of(number)} is {number.shown}"
            where = (number.place, *where)
        if weights is not None and not are_means(at, weights):
            yield at.says("a factor of one rank's loss", f"{said}.", *where)
        instead = OF_TRAINER if first.by_trainer else COUNTS
        yield at.says("mean over unequal counts", f"{said}.", *where, instead=instead)
    if weights is not None and reduced is not None:
        said += f": the ranks' own gradients weigh {weights_text(reduced)} in it,"
        said += f" and {weights_text(weights)} there."
        yield at.says("gradients not reduced", said, *where, instead=REDUCE)


def _updates(at: At) -> Hit:
    """Name a parameter that one process updates otherwise, from the same values and gradients."""
    for step in at.ranks:
        every = [step.parameters, *(other.parameters for other in at.ranks)]
        parts = {name for name in step.gradients if among(every, [name])}
        hit = far_apart(at.one.parameters, step.parameters, step.gradients.keys() - parts)
        if hit is not None:
            said = f"from the same gradients, {hit[1]} becomes another than in one process,"
            said += f" by {hit[0]:.2g}: the optimizer's step depends on what this rank has,"
            said += " or on the number of ranks."
            return hit[0], at.says("other optimizer step", said, step.places[2])
    return None


def _start_of_one(at: At) -> Hit:
    """Name a parameter with which one process begins otherwise than all ranks."""
    hit = far_apart(at.one.starts, at.ranks[0].starts, at.trained - at.joined)
    if hit is None:
        return None
    said = f"the ranks begin with another value of {hit[1]} than one process, by {hit[0]:.2g}"
    if (last := at.last_step_of(hit[1])) is None:
        return hit[0], at.says("other start values", f"{said}.", *at.ranks[0].places)
    return hit[0], at.says("other optimizer step", f"{said}, from the same gradients.", last.ranks[0].places[2])


def _no_mean(at: At) -> Joined | None:
    """Return the first scalar of a loss's computation that is neither the mean nor the sum of the ranks' scalars. If it
    is the loss itself, return the first such scalar of the program."""
    for number, alone in enumerate(at.one.numbers):
        if not all(number < len(step.numbers) and step.rows[number] for step in at.ranks):
            continue
        found = joined(alone, [s.numbers[number] for s in at.ranks], [s.rows[number] for s in at.ranks])
        other = [n for n in found.values() if not (n.is_mean or n.is_sum or n.is_alike)]
        of_loss = [n for n in other if n.key in at.one.of_loss[number]]
        if of_loss:
            return other[0] if of_loss[0].key == at.one.of_loss[number][-1] else of_loss[0]
    return None


def _factor(one: dict[str, Tensor], many: dict[str, Tensor]) -> float | None:
    """Return the factor that turns every gradient in `one` into the gradient in `many`."""
    if one.keys() != many.keys() or not one:
        return None
    a, b = (torch.cat([grads[name].flatten() for name in sorted(one)]) for grads in (one, many))
    factor = float(a @ b / (a @ a)) if float(a @ a) else 0.0
    return factor if factor and float((b - factor * a).norm()) <= LIMIT * float(b.norm()) else None


OF_RANKS: tuple[Callable[[At], Hit], ...] = (_diverged, _rates, _starts_apart, _other_state, _not_reduced, _clips)
RULES = (*OF_RANKS, _start_of_one, _no_owner, _gradients, _updates)
"""What is looked for in a step, in this order. OF_RANKS: where one process does not compute the same."""
