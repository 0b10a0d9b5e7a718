"""Compare the ranks of a plain script with one process.

A plain script is one that does not use meshwise. Tested in tests/checker/test_plain_scripts.py.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from meshwise.checker.difference import LIMIT
from meshwise.checker.plain import counts
from meshwise.checker.plain.record import Record, Step
from meshwise.checker.proof import Finding, PlainProof

MEANS = "DistributedDataParallel takes the mean over the ranks: the loss of a rank must be a mean."
COUNTS = (
    "Divide a rank's sum by the count of all ranks and multiply by their number, or mw.backward(loss, weight=count)."
)
OF_TRAINER = (
    "Divide a sum by num_items_in_batch, in compute_loss_func= or in the model's forward. If the forward has **kwargs "
    "and the loss is a mean over equally many items on each rank, set accepts_loss_kwargs = False in the model's class."
)


def judge(script: str, devices: str, ranks: Sequence[Record], one: Record, repeat: Any = list) -> PlainProof:
    """Compare the run of a script on several ranks with its run in one process, and return the result of the check."""
    not_judged = list(_not_judged(ranks, one))
    pairs = [(a, b) for a, b in zip(ranks[0].steps, one.steps, strict=False) if a.optimizer == b.optimizer]
    clipped = [(a.before_clipping, b.before_clipping) for a, b in pairs if a.clips]
    largest = max((_apart(b, a)[0] for a, b in [*pairs, *clipped]), default=0.0)
    between = [*_unreduced(ranks), *_clips(ranks)]
    shown = list(counts.shown(ranks, one, devices, one))
    if any(finding.wrong for finding in shown):  # a printed number may be a measurement, which differs in a second run
        shown = list(counts.shown(ranks, one, devices, next(iter(repeat()), None) or one))
    found = [
        *counts.reads(ranks, one, counts.agrees(ranks[0], one, shown)),
        *between,
        *([] if not_judged or between else _gradients(ranks, pairs)),
        *_scales(ranks),
        *counts.schedule(ranks, one, pairs),
        *counts.rates(ranks),
        *counts.norms(ranks),
        *counts.left_over(ranks[0]),
        *([] if _reads_others(ranks) else shown),
    ]
    once = {(each.kind, each.places): each for each in reversed(found)}  # keep the first of each kind and line
    epochs = len({p.number for p in ranks[0].passes if p.trained})
    return PlainProof(script, devices, len(pairs), epochs, largest, tuple(reversed(once.values())), tuple(not_judged))


def _reads_others(ranks: Sequence[Record]) -> bool:
    """Return True if one process cannot read the same samples as the ranks."""
    return counts.has_own_data(ranks) or any(p.samples is None for record in ranks for p in record.passes)


def _not_judged(ranks: Sequence[Record], one: Record) -> Iterator[str]:
    if one.refused:
        yield f"one process on the same samples: {one.refused}"
    if any(step.draws for record in (*ranks, one) for step in record.steps):
        yield "gradients: the script draws random numbers between a batch and its backward, and each rank draws others."
    if counts.has_own_data(ranks):
        yield "gradients: each rank has a data set of its own, which one process does not have."
    if any(p.samples is None for record in ranks for p in record.passes):
        yield "a loader without indices (IterableDataset, batch_size=None): which samples it reads is not known."
    if ranks[0].schedules and not ranks[0].ticked_at:
        yield f"the schedule of {ranks[0].schedules[0]}: its step() was not called."
    if not one.refused and len(one.steps) < len(ranks[0].steps):
        yield f"{len(ranks[0].steps) - len(one.steps)} steps that one process does not make."


def _apart(first: Step, other: Step) -> tuple[float, str]:
    """Return the largest difference between the gradients of two steps, and the name of the parameter that has it."""
    # Under ZeroRedundancyOptimizer, each rank updates only some parameters, so compare those in both steps.
    held = first.parameters.keys() & other.parameters.keys()
    one, many = ({n: g for n, g in step.gradients.items() if n in held} for step in (first, other))
    names = [name for name in one if name in many and one[name].shape == many[name].shape]
    size = max((float(one[name].norm()) for name in names), default=0.0)
    found = max(((float((one[n] - many[n]).norm()), n) for n in names), default=(0.0, ""))
    missing = [*(one.keys() ^ many.keys())]
    if missing:
        return float("inf"), sorted(missing)[0]
    return (found[0] / size if size else found[0], found[1])


def _unreduced(ranks: Sequence[Record]) -> Iterator[Finding]:
    starts = [[step.start for step in record.steps[1:]] for record in ranks]
    averaged = any(max(each) - min(each) <= LIMIT * max(each) for each in zip(*starts, strict=False))
    steps = zip(*(record.steps for record in ranks), strict=False)
    sides = ((first, *_apart(first, other)) for first, *others in steps for other in others)
    for first, name in [(first, name) for first, apart, name in sides if apart > LIMIT][:1]:
        said = f"the ranks step with other gradients of {name}"
        if averaged:
            said += ", and later have the same parameters again."
            yield Finding("local steps between averages", False, first.places, said)
        else:
            said += f": {first.unreduced}." if first.unreduced else "."
            instead = "Call the DistributedDataParallel, and run the last backward of a step outside of no_sync()."
            yield Finding("gradients not reduced", True, first.places, said, instead)


def _clips(ranks: Sequence[Record]) -> Iterator[Finding]:
    for first, *others in zip(*(record.steps for record in ranks), strict=False):
        if any(_apart(first, other)[0] > LIMIT for other in others):
            return
        for clips in zip(first.clips, *(step.clips for step in others), strict=False):
            norms = [norm for _, norm in clips]
            if max(norms) - min(norms) > LIMIT * max(norms):
                said = f"the ranks clip gradients of the norms {', '.join(f'{norm:.4g}' for norm in norms)}."
                instead = "Clip once, after the last backward of a step (accelerate: if accelerator.sync_gradients)."
                yield Finding("clipping before the reduction", True, (clips[0][0],), said, instead)
                return


def _gradients(ranks: Sequence[Record], pairs: Sequence[tuple[Step, Step]]) -> Iterator[Finding]:
    """Yield a finding for the first step in which gradients differ."""
    for number, (many, one) in enumerate(pairs):
        sides = [(many.before_clipping, one.before_clipping)] if many.clips else []
        for pair in [*sides, (many, one)]:
            if _apart(*pair)[0] > LIMIT:
                yield _of_gradients(number, [record.steps[number : number + 1] for record in ranks], *pair)
                return


def _of_gradients(number: int, ranks: Sequence[Sequence[Step]], many: Step, one: Step) -> Finding:
    apart, name = _apart(one, many)
    mean = statistics.fmean(step.loss for steps in ranks for step in steps)
    factor = _factor(one.gradients, many.gradients)
    where = tuple(dict.fromkeys((many.places[1], many.places[0])))
    size = f"step {number + 1}: the gradient of {name} differs by {apart:.2g} of the size of all"
    if factor is not None:
        size = f"step {number + 1}: every gradient is {factor:.6g} times that of one process on the same samples."
        return Finding("gradient times a number", True, where, size, OF_TRAINER if many.by_trainer else MEANS)
    if abs(mean - one.loss) > LIMIT * max(abs(one.loss), abs(mean)):
        size += (
            f"; the mean of the ranks' losses is {mean:.6g}, but one process has {one.loss:.6g}: the ranks' "
            "losses are means over different counts (tokens, samples)."
        )
        return Finding("mean over unequal counts", True, where, size, OF_TRAINER if many.by_trainer else COUNTS)
    size += ", though the losses agree"
    if many.hooks:
        size += ": a hook changes each rank's gradient before the mean."
        instead = "Change the gradients after the backward."
        return Finding("a hook before the reduction", True, many.hooks, size, instead)
    return Finding("other gradients", True, where, f"{size}.")


def _factor(one: dict[str, Tensor], many: dict[str, Tensor]) -> float | None:
    """Return the factor that turns every gradient in `one` into the gradient in `many`."""
    if one.keys() != many.keys() or not one:
        return None
    a, b = (torch.cat([grads[name].flatten() for name in sorted(one)]) for grads in (one, many))
    factor = float(a @ b / (a @ a)) if float(a @ a) else 0.0
    return factor if factor and float((b - factor * a).norm()) <= LIMIT * float(b.norm()) else None


def _scales(ranks: Sequence[Record]) -> Iterator[Finding]:
    whole = ranks[0].microbatches
    for step in [each for each in ranks[0].steps if len(each.scales) == whole > 1]:
        if abs(step.scales[-1] * whole * whole - 1) < 1e-6:
            said = f"each of {whole} losses of a step is multiplied by {step.scales[-1]:.6g}, or 1/{whole * whole}."
            instead = "Divide once: accelerator.backward divides by gradient_accumulation_steps itself."
            yield Finding("loss divided by the accumulation twice", True, (step.places[1],), said, instead)
            return
