"""Compare the ranks of a plain script with one process.

A plain script is one that does not use meshwise. The causes stand in a table, in the order of their evidence: the first
that holds in the first step that differs is named. Tested in tests/checker/test_plain_scripts.py.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from meshwise.checker.diagnose_weights import line_of
from meshwise.checker.difference import FLOOR, LIMIT
from meshwise.checker.loss_numbers import Joined, joined
from meshwise.checker.plain import counts
from meshwise.checker.plain.record import Record, Step
from meshwise.checker.proof import Finding, PlainProof
from meshwise.checker.rank_weights import shown as weights_text
from meshwise.checker.rank_weights import solve
from meshwise.checker.sketches import pieces
from meshwise.spec.words import some
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
AFTER = "Change the gradients after the backward."
WHOLE_BATCH = "Gather what it is computed from, with its gradient, or sum its parts over the ranks."
DIVERGED, UNKNOWN = "ranks diverged", "cause unknown"
Tensors = Mapping[str, Tensor]


@dataclass(frozen=True)
class At:
    """One step of an optimizer, on the ranks and in one process.

    number: counts the steps of all optimizers, from 1.
    trained: the names of all parameters that an optimizer has.
    joined: those of them that differ between ranks after some step, and are equal again at the start of a later one.
    """

    number: int
    ranks: list[Step]
    one: Step
    before: At | None
    trained: frozenset[str]
    joined: frozenset[str]

    @property
    def many(self) -> dict[str, Tensor]:
        """The gradients before any clipping, each of the first rank that has it."""
        return {k: g for step in reversed(self.ranks) for k, g in step.before_clipping.gradients.items()}

    @property
    def apart(self) -> set[str]:
        """The parameters whose gradients differ between ranks."""
        first, *others = (step.gradients for step in self.ranks)
        return {name for other in others for name in first.keys() & other.keys() if _far(first, other, [name])}

    @property
    def is_local(self) -> bool:
        """Whether each rank makes this step by itself, in a program that averages parameters later."""
        first, *others = (step.starts for step in self.ranks)
        return bool(self.apart & self.joined) or any(_far(first, other, self.joined) for other in others)

    def last_step_of(self, name: str) -> At | None:
        """Return the newest step before this one that updates a parameter on some rank."""
        at = self.before
        while at is not None and not any(name in step.parameters for step in at.ranks):
            at = at.before
        return at

    def says(self, kind: str, evidence: str, *places: str, instead: str = "") -> Finding:
        """Return a finding of this step."""
        where = tuple(dict.fromkeys(place for place in places if place))
        return Finding(kind, True, where, f"step {self.number}: {evidence}", instead)


def judge(script: str, devices: str, ranks: Sequence[Record], one: Record, repeat: Any = list) -> PlainProof:
    """Compare the run of a script on several ranks with its run in one process, and return the result of the check."""
    steps, other_data = list(_steps(ranks, one)), bool(one.refused) or _reads_others(ranks)
    drawn = [at for at in steps if any(step.draws for step in (*at.ranks, at.one))]
    local = [at for at in steps if at.is_local]
    found, largest = list[Finding](), 0.0
    for at in steps:
        rules = OF_RANKS if other_data or at in drawn or at in local else RULES
        hits = [hit for rule in rules if (hit := rule(at)) is not None]
        largest = max([largest, *(far for far, _ in hits)])
        found += [finding for _, finding in hits[:1] if not found]
    found += _ends_alone(ranks) if not found else ()
    not_judged = [*_not_judged(ranks, one)]
    if local:
        names = some(sorted(set().union(*(at.apart & at.joined for at in local))))
        said = f"step {_numbers(local)}: the ranks step with other gradients of {names}, and later have the same values"
        not_judged.append(f"{said}. Such local steps between averages cannot be repeated by one process.")
    if drawn:
        said = "the script draws random numbers between a batch and its backward, and each rank draws others."
        not_judged.append(f"the gradients of step {_numbers(drawn)}: {said}")
    shown = list(counts.shown(ranks, one, devices, one))
    if any(finding.wrong for finding in shown):  # a printed number may be a measurement, which differs in a second run
        shown = list(counts.shown(ranks, one, devices, next(iter(repeat()), None) or one))
    found = [
        *counts.reads(ranks, one, counts.agrees(ranks[0], one, shown)),
        *found,
        *_scales(ranks),
        *counts.schedule(ranks, one, [(at.ranks[0], at.one) for at in steps]),
        *counts.rates(ranks),
        *counts.norms(ranks),
        *counts.left_over(ranks[0]),
        *([] if _reads_others(ranks) else shown),
    ]
    once = {(each.kind, each.places): each for each in reversed(found)}  # keep the first of each kind and line
    epochs = len({p.number for p in ranks[0].passes if p.trained})
    return PlainProof(script, devices, len(steps), epochs, largest, tuple(reversed(once.values())), tuple(not_judged))


def _numbers(steps: Sequence[At]) -> str:
    return some([str(at.number) for at in steps], 8)


def _steps(ranks: Sequence[Record], one: Record) -> Iterator[At]:
    """Yield the steps that all ranks make, in the order of rank 0. What one process lacks is empty."""
    sides = [_by_optimizer(record) for record in (*ranks, one)]
    trained = frozenset(name for step in ranks[0].steps for name in step.starts)
    before: At | None = None
    joined_of = dict[int, frozenset[str]]()
    made = dict.fromkeys(sides[0], 0)
    for number, first in enumerate(ranks[0].steps, 1):
        of, at = first.optimizer, made[first.optimizer]
        made[of] += 1
        found = [side.get(of, [])[at : at + 1] for side in sides]
        if not all(found[:-1]):
            continue
        if of not in joined_of:
            joined_of[of] = _joined([list(each) for each in zip(*(side[of] for side in sides[:-1]), strict=False)])
        alone = found[-1][0] if found[-1] else Step()
        before = At(number, [step for (step,) in found[:-1]], alone, before, trained, joined_of[of])
        yield before


def _by_optimizer(record: Record) -> dict[int, list[Step]]:
    found = dict[int, list[Step]]()
    for step in record.steps:
        found.setdefault(step.optimizer, []).append(step)
    return found


def _joined(steps: Sequence[list[Step]]) -> frozenset[str]:
    """Return the parameters that ranks update from other gradients, and that are equal again at a later start."""
    parted, found = set[str](), set[str]()
    for first, *others in steps:
        found |= {n for n in parted if not any(_far(first.starts, other.starts, [n]) for other in others)}
        for other in others:
            held = first.gradients.keys() & other.gradients.keys()
            parted |= {name for name in held if _far(first.gradients, other.gradients, [name])}
    return frozenset(found)


def _far(one: Tensors, other: Tensors, names: Iterable[str] | None = None) -> tuple[float, str] | None:
    """Return the largest difference between tensors of the same name, relative to the tensor's norm or a thousandth of
    the largest, and the name. Return None if it is at most LIMIT."""
    most = FLOOR * max((float(value.norm()) for value in one.values()), default=0.0)
    found = list[tuple[float, str]]()
    for name in sorted((one.keys() if names is None else set(names)) & one.keys() & other.keys()):
        alike = one[name].shape == other[name].shape
        far = float((one[name] - other[name]).norm()) if alike else float("inf")
        size = max(float(one[name].norm()), most)
        found.append((far / size if size else far and float("inf"), name))
    worst = max(found, default=(0.0, ""))
    return None if worst[0] <= LIMIT else worst


def _ends_alone(ranks: Sequence[Record]) -> Iterator[Finding]:
    """Report a rank that lost the others, which had ended or made another call."""
    for record in ranks:
        if record.lost:
            made = ", ".join(str(len(each.steps)) for each in ranks)
            said = f"rank {record.rank} lost another rank here. The ranks had made {made} steps of their optimizers."
            yield Finding(DIVERGED, True, (record.lost,), said, ADVICE)
            return


def _any_far(held: Sequence[Tensors], name: str) -> bool:
    return any(_far(held[0], other, [name]) for other in held[1:])


Hit = tuple[float, Finding] | None
"""How far the values are apart on which a finding rests, and the finding."""


def _diverged(at: At) -> Hit:
    """Name a rank that steps with another batch of its loop than rank 0."""
    first, *others = ([each and each[1:] for each in step.batches] for step in at.ranks)
    for rank, batches in enumerate(others, 1):
        pairs = zip(first, batches, strict=False)
        if len(first) != len(batches) or any(a != b for a, b in pairs if a and b):
            sides = (", ".join(f"{each[1] + 1}" for each in side if each) for side in (first, batches))
            said = "rank 0 steps with batch {} of its loop and rank {} with batch {}.".format(next(sides), rank, *sides)
            return float("inf"), at.says(DIVERGED, said, *at.ranks[rank].places, instead=ADVICE)
    return None


def _rates(at: At) -> Hit:
    """Name a setting of the optimizer that differs between ranks, such as its learning rate."""
    first, *others = at.ranks
    for other in others:
        for mine, theirs in zip(first.settings, other.settings, strict=False):
            for key in mine.keys() & theirs.keys():
                far = abs(mine[key] - theirs[key]) / max(abs(mine[key]), abs(theirs[key]), 1e-300)
                if far > LIMIT:
                    name = "learning rate" if key == "lr" else key
                    said = f"it is {', '.join(f'{s.settings[0].get(key, 0.0):.6g}' for s in at.ranks)} on the ranks."
                    return far, at.says(f"{name} of one rank", said, first.places[2], instead=counts.ALIKE)
    return None


def _starts_apart(at: At) -> Hit:
    """Name a parameter that ranks have with other values as the step begins."""
    first, *others = at.ranks
    hit = next((far for other in others if (far := _far(first.starts, other.starts, at.trained - at.joined))), None)
    if hit is None:
        return None
    size, name = hit
    said, last = f"the ranks begin with other values of {name}, by {size:.2g}", at.last_step_of(name)
    if last is None:
        kind, said = "other start values", f"{said}."
        instead = "Start all ranks from the values of rank 0: DistributedDataParallel sends them."
    elif not all(name in step.parameters for step in last.ranks) or _any_far([s.parameters for s in last.ranks], name):
        kind, said = "an update of one rank", f"{said}, as after step {last.number}."
        instead = "Send what a rank has updated to all others after each step."
    else:
        kind, said = "changed outside of the step", f"{said}, and were equal after step {last.number}."
        instead = "Change parameters on all ranks alike."
    return size, at.says(kind, said, *first.places, instead=instead)


def _other_state(at: At) -> Hit:
    """Name a parameter that no optimizer has, or a buffer, that differs as the forward begins."""
    first, *others = at.ranks
    names = first.state.keys() - at.trained
    hit = next((far for other in others if (far := _far(first.state, other.state, names))), None)
    if hit is None:
        return None
    said = f"the ranks have other values of {hit[1]}, by {hit[0]:.2g}, which no optimizer updates."
    instead = "Send it from rank 0 once, and update it from values that are alike on all ranks."
    return hit[0], at.says("other state of a rank", said, *first.places, instead=instead)


def _not_reduced(at: At) -> Hit:
    names = at.apart - at.joined
    sides = ((first, far) for first, *others in [at.ranks] for other in others
             if (far := _far(first.gradients, other.gradients, names)))  # fmt: skip
    for first, (size, name) in sides:
        said = f"the ranks step with other gradients of {name}{f': {first.unreduced}' if first.unreduced else ''}."
        return size, at.says("gradients not reduced", said, *first.places, instead=REDUCE)
    return None


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
    for name in sorted(one - many):
        return float("inf"), at.says("a parameter that no rank updates", f"no rank has a gradient of {name}.", *where)
    name = min(many - one)
    return float("inf"), at.says("other gradients", f"one process has no gradient of {name}.", *where)


def _gradients(at: At) -> Hit:
    """Name the cause of gradients that are other than those of one process."""
    one, many, first = at.one.before_clipping.gradients, at.many, at.ranks[0]
    hit = _far(one, many)
    if hit is None:
        clipped = _far(at.one.gradients, {k: g for s in reversed(at.ranks) for k, g in s.gradients.items()})
        if clipped is None:
            return None
        said = f"the gradient of {clipped[1]} differs by {clipped[0]:.2g} after it is clipped, and not before."
        return clipped[0], at.says("clipping of a part", said, *(place for place, _ in first.clips))
    size, name = hit
    where: tuple[str, ...] = (first.places[1], first.places[0])
    since = "; the steps before are equal" * (at.before is not None)
    of_trainer = first.by_trainer
    weights = _weights(at, _total(at.one.own))
    factor, means = _factor(one, many), weights is not None and all(abs(w * len(at.ranks) - 1) < 1e-6 for w in weights)
    if factor is not None:
        said = f"every gradient is {factor:.6g} times that of one process on the same samples{since}."
        if means and first.reduced_at:
            return size, at.says("changed in the reduction", said, *first.reduced_at, *where)
        return size, at.says("gradient times a number", said, *where, instead=OF_TRAINER if of_trainer else MEANS)
    said = f"the gradient of {name} differs by {size:.2g}{since}"
    reduced = _weights(at, {name: pieces(g) for name, g in many.items()})
    mean, loss = statistics.fmean(step.loss for step in at.ranks), at.one.loss
    losses = f"the mean of the ranks' losses is {mean:.6g}, but one process has {loss:.6g}"
    statistic = _no_mean(at)
    over = statistic is not None and statistic.is_mean_of_its_own
    if first.hooks and weights is not None and reduced is None:
        said += ": a hook changes each rank's gradient before the mean."
        return size, at.says("a hook before the reduction", said, *first.hooks, instead=AFTER)
    if weights is not None and reduced is None:
        said += ", though the gradients of the ranks' own losses add up to it: they are changed as they are reduced."
        return size, at.says("changed in the reduction", said, *first.reduced_at, *where)
    if over or (weights is not None and reduced is not None and _differ_by_rank(at, weights)):
        said += f"; {losses}"
        if weights is not None and reduced is not None:
            said += f": gradients of the ranks weigh {weights_text(weights)} there, and {weights_text(reduced)} here"
        if statistic is not None:
            said, where = f"{said}. {line_of(statistic)} is {statistic.shown}", (statistic.place, *where)
        kind = "mean over unequal counts"
        if weights is not None and not over and abs(sum(weights) - len(at.one.own)) > 1e-6:
            kind, of_trainer = "a factor of one rank's loss", False
        return size, at.says(kind, f"{said}.", *where, instead=OF_TRAINER if of_trainer else COUNTS)
    if weights is not None and reduced is not None:
        said += f": the ranks' own gradients weigh {weights_text(reduced)} in it, and {weights_text(weights)} there."
        return size, at.says("gradients not reduced", said, *where, instead=REDUCE)
    if statistic is not None:
        said += f"; {losses}. {line_of(statistic)} is {statistic.shown}: neither a mean nor a sum of the ranks' values."
        return size, at.says("a statistic of the rank's own batch", said, statistic.place, *where, instead=WHOLE_BATCH)
    if abs(mean - loss) <= LIMIT * max(abs(loss), abs(mean)):
        said += ", though the losses agree"
        if first.hooks:
            said += ": a hook changes each rank's gradient before the mean."
            return size, at.says("a hook before the reduction", said, *first.hooks, instead=AFTER)
        return size, at.says("other gradients", f"{said}.", *where)
    if not any(at.one.own):
        said += f"; {losses}: the ranks' losses are means over different counts (tokens, samples)."
        return size, at.says("mean over unequal counts", said, *where, instead=OF_TRAINER if of_trainer else COUNTS)
    return size, at.says(UNKNOWN, f"{said}; {losses}.", *where)


def _updates(at: At) -> Hit:
    """Name a parameter that one process updates otherwise, from the same values and gradients."""
    for step in at.ranks:
        others = [other.parameters for other in at.ranks if other is not step]
        parts = {name for other in others for name in step.gradients if _far(step.parameters, other, [name])}
        hit = _far(at.one.parameters, step.parameters, step.gradients.keys() - parts)
        if hit is not None:
            said = f"from the same gradients, {hit[1]} becomes another than in one process, by {hit[0]:.2g}: the "
            said += "optimizer's step depends on what this rank has, or on the number of ranks."
            return hit[0], at.says("other optimizer step", said, step.places[2])
    return None


def _start_of_one(at: At) -> Hit:
    """Name a parameter with which one process begins otherwise than all ranks."""
    hit = _far(at.one.starts, at.ranks[0].starts, at.trained - at.joined)
    if hit is None:
        return None
    said = f"the ranks begin with another value of {hit[1]} than one process, by {hit[0]:.2g}"
    if (last := at.last_step_of(hit[1])) is None:
        return hit[0], at.says("other start values", f"{said}.", *at.ranks[0].places)
    return hit[0], at.says("other optimizer step", f"{said}, from the same gradients.", last.ranks[0].places[2])


def _total(own: Sequence[Tensors]) -> dict[str, Tensor]:
    """Add up the gradients of all backwards of a step."""
    return {name: sum((g[name] for g in own if name in g), torch.zeros(())) for name in set().union(*own)}


def _weights(at: At, wanted: Tensors) -> list[float] | None:
    """Return the weights with which the gradients of each rank's losses, in order, add up to the wanted gradients."""
    own = [named for step in at.ranks for named in step.own]
    names = sorted(wanted.keys() & set().union(*own))
    if not names or any(name not in named for named in own for name in names):
        return None
    *columns, right = (torch.cat([named[name] for name in names]) for named in (*own, wanted))
    found = solve(torch.stack(columns, 1), right)
    return found[0] if found is not None and found[1] else None


def _differ_by_rank(at: At, weights: Sequence[float]) -> bool:
    """Return whether ranks weigh differently in some microbatch."""
    count = len(weights) // len(at.ranks)
    return any(max(weights[m::count]) - min(weights[m::count]) > 1e-6 for m in range(count))


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


OF_RANKS: tuple[Callable[[At], Hit], ...] = (_diverged, _rates, _starts_apart, _other_state, _not_reduced, _clips)
RULES = (*OF_RANKS, _start_of_one, _no_owner, _gradients, _updates)
"""What is looked for in a step, in this order. OF_RANKS: where one process does not compute the same."""


def _reads_others(ranks: Sequence[Record]) -> bool:
    """Return True if one process cannot read the same samples as the ranks."""
    return counts.has_own_data(ranks) or any(p.samples is None for record in ranks for p in record.passes)


def _not_judged(ranks: Sequence[Record], one: Record) -> Iterator[str]:
    if one.refused:
        yield f"one process on the same samples: {one.refused}"
    if counts.has_own_data(ranks):
        yield "gradients: each rank has a data set of its own, which one process does not have."
    if any(p.samples is None for record in ranks for p in record.passes):
        yield "a loader without indices (IterableDataset, batch_size=None): which samples it reads is not known."
    if ranks[0].schedules and not ranks[0].ticked_at:
        yield f"the schedule of {ranks[0].schedules[0]}: its step() was not called."
    if not one.refused and len(one.steps) < len(ranks[0].steps):
        yield f"{len(ranks[0].steps) - len(one.steps)} steps that one process does not make."


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
