"""Judge how ranks read samples, step schedulers and print metrics.

A tick is one step of a learning rate scheduler. Tested in tests/checker/test_plain_scripts.py.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from decimal import Decimal

from meshwise.checker.difference import LIMIT
from meshwise.checker.finding import Finding
from meshwise.checker.plain.record import Pass, Record, Step
from meshwise.checker.printed_numbers import numbers_apart, printed_otherwise

ALIKE = "Set it alike on all ranks. A schedule needs a metric of all ranks: all_reduce sums and counts before dividing."
ALONE = "in one process on all their samples."
OF_ACCELERATE = "Use gather_for_metrics, or cut what is gathered to len(dataset)"
OF_DDP = "Read Subset(data, range(rank, len(data), world)), call model.module, and all_reduce sums and counts"
BROADCAST = "broadcast batch norm's statistics before it (for b in model.buffers(): dist.broadcast(b, 0))"
TWICE = "samples counted twice in the evaluation"


def _by_pass(ranks: Sequence[Record]) -> Iterator[list[Pass]]:
    """Yield one list for each pass over a loader. It holds the `Pass` of every rank that makes this pass."""
    passes = [p for record in ranks for p in record.passes if p.samples is not None]
    keys = dict.fromkeys((p.loader, p.number) for p in passes)
    for key in keys:
        yield [p for record in ranks for p in record.passes if (p.loader, p.number) == key]


def has_own_data(ranks: Sequence[Record]) -> bool:
    """Return whether ranks read different data sets, so that the same index means different samples."""
    return any(len({p.content for p in passes}) > 1 for passes in _by_pass(ranks))


def reads(ranks: Sequence[Record], one: Record, agrees: bool) -> Iterator[Finding]:
    """Yield findings about the samples that ranks read."""
    for passes in _by_pass(ranks):
        first, trained = passes[0], any(p.trained for p in passes)
        if first.is_peek:
            continue
        of_rank = [p for p in ranks[0].passes if p.loader == first.loader and not p.is_peek]
        before = [p for p in of_rank if p.number < first.number]
        of_loader = [p for p in one.passes if p.loader == first.loader]
        alone = [p for p in of_loader if p.number == first.number]
        batch = sum(len(p.batches[0]) for p in passes if p.batches)
        draws_again = any(len(set(p.read)) < 0.9 * len(p.read) for p in alone)  # the sampler draws with replacement
        every_epoch = [set(p.read) for p in of_loader if not p.endless]
        varies = bool(every_epoch) and len(set().union(*every_epoch)) - len(every_epoch[0]) >= batch > 0
        shared = len(passes) == len(ranks) > 1 and not has_own_data(ranks)
        if not before and shared and not draws_again and not any(p.endless for p in passes):
            once = OF_ACCELERATE if ranks[0].accelerate else OF_DDP
            # A forward of DDP broadcasts the statistics of batch norms, but a forward of model.module does not.
            if ranks[0].norms and not ranks[0].accelerate:
                once += f"; {BROADCAST}"
            if not varies:
                yield from _shares(passes, alone, batch, agrees, once)
            elif alone and trained:
                yield from _shares_of_a_part(passes, alone[0], batch)
        again = bool(before) and before[-1].trained and before[-1].read == first.read
        if trained and first.shuffles and again and not first.endless:
            evidence = "two epochs read the samples in the same shuffled order."
            instead = "Call sampler.set_epoch(epoch) before each epoch."
            yield Finding("set_epoch is missing", True, first.places, evidence, instead)
        if trained and not before:
            yield from _batch(passes, alone)


def _shares(passes: Sequence[Pass], alone: Sequence[Pass], batch: int, agrees: bool, once: str) -> Iterator[Finding]:
    """Yield findings for samples that no rank reads, or that several ranks read, in one pass over a loader. What one
    process reads with the same sampler are all samples."""
    first, ranks, trained = passes[0], len(passes), any(p.trained for p in passes)
    every = frozenset(alone[0].read) if alone else frozenset[int]().union(*(p.samples or () for p in passes))
    counts = Counter(index for p in passes for index in p.read)
    never, size = len(every - counts.keys()), len(every)
    twice = sum(count - 1 for count in counts.values())
    padding = {index for p in passes for index in (p.batches[-1] if p.batches else ())}
    in_the_middle = any(count > 1 and index not in padding for index, count in counts.items())
    other = len(counts.keys() - every)
    if other >= max(batch, 1):  # fewer may be left out at the end of one process's epoch
        evidence = f"{other} samples are read by the ranks, and not by one process with the same sampler."
        yield Finding("other samples than one process", True, first.places, evidence)
    if size > 0 and all(len(set(p.read)) > 0.9 * size for p in passes):
        yield from _whole(passes, size, trained, agrees)
    elif trained:
        if never:
            instead = "" if never < batch else "Share out the whole data set: DistributedSampler(dataset)."
            evidence = f"{never} of {size} samples are read by no rank in an epoch."
            yield Finding("samples never read", bool(instead), first.places, evidence, instead)
        if twice:
            right = twice < batch and not in_the_middle
            instead = "" if right else "Share out each sample once: DistributedSampler(dataset)."
            why = "." if instead else ", so that all ranks have as many."
            evidence = f"{twice} of {size} samples are read twice in an epoch{why}"
            yield Finding("samples read twice", bool(instead), first.places, evidence, instead)
    else:
        ends = "; what is shown after it agrees with one device." if agrees else "."
        if never:
            evidence = f"{never} of {size} samples are read by no rank{ends}"
            instead = "Leave drop_last out, and share out the whole data set."
            yield Finding("samples left out of the evaluation", not agrees, first.places, evidence, instead)
        if twice and not any(p.padded_away for p in passes):
            evidence = f"{twice} of {size} samples are read twice, "
            evidence += f"so that all {ranks} ranks have as many{ends}"
            instead = f"{once}; with mw.distribute nothing repeats."
            yield Finding(TWICE, not agrees, first.places, evidence, instead)


def _shares_of_a_part(passes: Sequence[Pass], alone: Pass, batch: int) -> Iterator[Finding]:
    """Yield a finding if ranks share out what one process would read another part of in each epoch, but not all of
    it: each rank reads as many samples as one process, and no two ranks the same."""
    read = [set(p.read) for p in passes]
    every = frozenset[int]().union(*(p.samples or () for p in passes))
    together = set().union(*read)
    never = len(every) - len(together)
    if sum(map(len, read)) == len(together) and abs(len(alone.read) - len(read[0])) < batch <= never:
        evidence = f"{never} of {len(every)} samples are read by no rank in an epoch,"
        evidence += " and the ranks share out the others."
        instead = "Let each of R ranks take every R-th sample."
        yield Finding("samples never read", True, passes[0].places, evidence, instead)


def _whole(passes: Sequence[Pass], size: int, trained: bool, agrees: bool) -> Iterator[Finding]:
    """Yield a finding for a loop in which each rank reads all samples, if it trains or joins the ranks' results."""
    first, ranks = passes[0], len(passes)
    if trained:
        evidence = f"each of {ranks} ranks reads all {size} samples of an epoch."
        instead = "Give the DataLoader a DistributedSampler, or the loader to accelerator.prepare."
        yield Finding("all ranks read the same samples", True, first.places, evidence, instead)
    elif any(p.padded_away for p in passes):
        evidence = f"each of {ranks} ranks reads all {size} samples, "
        evidence += "and gather_for_metrics joins what they give."
        yield Finding(TWICE, not agrees, first.places, evidence, "Give the loader to accelerator.prepare.")


def _batch(passes: Sequence[Pass], alone: Sequence[Pass]) -> Iterator[Finding]:
    """Report a global batch whose size differs from the batch size in one process."""
    if not alone or not all(p.batches for p in (*alone, *passes)):
        return
    ours, own = sum(len(p.batches[0]) for p in passes), len(alone[0].batches[0])
    if ours != own:
        evidence = f"a batch has {ours} samples on {len(passes)} devices and {own} on one."
        yield Finding("batch size is per device", False, passes[0].places, evidence)


def schedule(ranks: Sequence[Record], one: Record, pairs: Sequence[tuple[Step, Step]]) -> Iterator[Finding]:
    """Compare the learning rate schedule on the ranks with the schedule in one process."""
    many = ranks[0]
    ticks = [statistics.median([step.ticks for step in side.steps[1:]] or [0]) for side in (many, one)]
    lengths = [_steps_of_pass(record) for record in (many, one)]
    begun = [pair for pair in pairs[:1] if all(step.settings for step in pair)]
    rates = [step.settings[0].get("lr", 0.0) for pair in begun for step in pair]
    if rates and rates[0] != rates[1]:
        evidence = f"it begins with {rates[0]:.4g} on {len(ranks)} devices and with {rates[1]:.4g} on one."
        yield Finding("learning rate depends on the devices", False, (many.steps[0].places[2],), evidence)
    if not all(ticks) or not all(lengths) or many.horizon is None or one.horizon is None:
        if all(ticks) and ticks[0] != ticks[1] and not many.accelerate:
            evidence = f"{ticks[0]:g} times a step on {len(ranks)} devices, {ticks[1]:g} on one."
            yield _ticks_twice(many, True, evidence)
        return
    horizons = many.horizon, one.horizon
    if many.length and one.length:  # the training ends by steps: its schedule must end at the same fraction of them
        parts = [h / t / side.length for h, t, side in zip(horizons, ticks, (many, one), strict=True)]
        if abs(parts[0] - parts[1]) > LIMIT:
            by_steps = ticks[0] == ticks[1] and horizons[0] == horizons[1] and abs(parts[1] - 1) > 0.01
            evidence = f"the schedule ends after {parts[0]:.3g} of the steps on {len(ranks)} devices and after"
            yield _ticks_twice(many, not by_steps, f"{evidence} {parts[1]:.3g} on one.")
        return
    paces = [t * _whole_steps(n, h / t) for t, n, h in zip(ticks, lengths, horizons, strict=True)]  # ticks per epoch
    epochs = [h / pace for h, pace in zip(horizons, paces, strict=True)]
    whole = abs(epochs[1] - round(epochs[1])) < 0.01
    if horizons[0] == horizons[1] and ticks[0] != ticks[1] and not whole:
        evidence = f"{ticks[0]:g} ticks a step on {len(ranks)} devices and {ticks[1]:g} on one, for a schedule of "
        yield _ticks_twice(many, True, f"{evidence}{many.horizon} steps on both.")
        return
    if abs(paces[0] * one.horizon / many.horizon - paces[1]) > max(len(ranks), 0.1 * paces[1]):  # allow uneven batches
        by_steps = ticks[0] == ticks[1] and many.horizon == one.horizon and not whole
        evidence = f"the schedule ends after {epochs[0]:.3g} epochs on {len(ranks)} devices "
        evidence += f"and after {epochs[1]:.3g} on one ({ticks[0]:g} and {ticks[1]:g} ticks a step, "
        evidence += f"{many.horizon} and {one.horizon} in all)."
        yield _ticks_twice(many, not by_steps, evidence)


def _ticks_twice(many: Record, wrong: bool, evidence: str) -> Finding:
    """Return the finding that the scheduler ticks at another pace on several ranks than in one process."""
    where = tuple(dict.fromkeys(place for place in many.ticked_at if place))
    instead = "Count its length in the ticks that this number of devices makes."
    return Finding("scheduler ticks at another pace", wrong, where, evidence, instead)


def _steps_of_pass(record: Record) -> float:
    """Return the number of optimizer steps in an epoch, e.g. 2.5 for 5 batches if a step takes 2 batches."""
    trained = [p for p in record.passes if p.trained]
    if not trained or not record.steps:
        return 0.0
    return len(trained[0].batches) / record.microbatches


def _whole_steps(steps: float, horizon: float) -> float:
    """Round the number of optimizer steps in an epoch so that it divides the schedule's length, if possible."""
    whole = (each for each in (math.floor(steps), math.ceil(steps)) if each and horizon % each == 0)
    return next(whole, steps)


def rates(ranks: Sequence[Record]) -> Iterator[Finding]:
    """Yield a finding if a schedule gets a metric that differs between ranks."""
    for each in zip(*(record.plateau_metrics for record in ranks), strict=False):
        place, metrics = each[0][0], [number for _, number in each]
        if max(metrics) - min(metrics) > LIMIT * max(map(abs, metrics)):
            evidence = f"its schedule's metric is {', '.join(f'{n:.6g}' for n in metrics)} on the ranks."
            yield Finding("learning rate of one rank", True, (place,), evidence, ALIKE)
            return


def norms(ranks: Sequence[Record]) -> Iterator[Finding]:
    """Report batch norms that normalize the samples of each rank separately."""
    if ranks[0].norms and len(ranks) > 1:
        where = tuple(step.places[0] for step in ranks[0].steps[:1])
        evidence = f"{', '.join(ranks[0].norms)} normalizes each rank's samples by themselves."
        instead = "nn.SyncBatchNorm.convert_sync_batchnorm(model) normalizes the whole batch."
        yield Finding("batch norm per rank", False, where, evidence, instead)


def left_over(first: Record) -> Iterator[Finding]:
    """Report an epoch that ends with backward passes but no optimizer step, so that their gradients go into the first
    step of the next epoch."""
    usual = first.microbatches
    late = next((step for step in first.steps[1:] if len(step.scales) > usual), None)
    if late is not None and not late.by_trainer and sum(each.trained for each in first.passes) > 1:
        evidence = f"{usual} batches make a step, and one has {len(late.scales)}: "
        evidence += "the gradients of an epoch's last batches are added to the next epoch's first step. "
        evidence += "How many are left depends on the devices."
        yield Finding("gradients left over from an epoch", False, (late.places[2],), evidence)


def agrees(first: Record, one: Record, apart: Sequence[Finding]) -> bool:
    """Return True if the script prints the same numbers in its evaluations on rank 0 as in one process."""
    printed = [[text for _, text, after in record.shown if not after] for record in (first, one)]
    numbers = all(any(character.isdigit() for text in side for character in text) for side in printed)
    return numbers and not any(finding.wrong for finding in apart)


def shown(ranks: Sequence[Record], one: Record, devices: str, again: Record) -> Iterator[Finding]:
    """Yield a finding for each source line that prints different numbers on rank 0 than in one process."""
    first, used = ranks[0], list(zip(*(record.evaluated for record in ranks), strict=False))
    own = any(max(each) - min(each) > LIMIT * max(each) for each in used)
    for trains, wrong in ((False, True), (True, False)):
        sides = [[(line, text) for line, text, after in each.shown if after is trains] for each in (one, first, again)]
        texts, _ = printed_otherwise(sides[0], sides[1], devices)
        for text in texts:
            line = text.partition(" shows ")[0]
            printed = [[other for place, other in side if place == line] for side in sides]
            apart = [pair for each in zip(*printed, strict=False) for pair in numbers_apart(*each)]
            apart = [pair for pair in apart if not _are_rates(pair, one, first)]
            metric = wrong and not all(_is_of_training(pair, one, first) for pair in apart)
            kind = "metric differs from one device's" if metric else "number of one rank"
            evidence = text.removesuffix("on one device.") + ALONE
            instead = "Sum over all ranks' samples, each counted once, before dividing." if metric else ""
            if metric and own:
                evidence += " The ranks evaluate with other statistics of batch norm, each with its own."
                also = "Where all ranks read as many batches, call the DistributedDataParallel; "
                also += f"else {BROADCAST}."
                instead = f"{also} {instead}"
            if apart:
                yield Finding(kind, metric, (line,), evidence, instead)


def _are_rates(pair: tuple[Decimal, Decimal], one: Record, first: Record) -> bool:
    """Return True if both printed numbers are learning rates."""
    return all(any(_shows(n, rate) for rate in side.rates) for n, side in zip(pair, (one, first), strict=True))


def _is_of_training(pair: tuple[Decimal, Decimal], one: Record, first: Record) -> bool:
    """Return True if both printed numbers are sums or means of training losses, over the same consecutive
    microbatches."""
    losses, micro = [one.losses, first.losses], float(one.microbatches)
    lengths = {float(len(read.batches)) for read in first.passes if read.trained}
    for begin, end in itertools.combinations(range(1 + min(map(len, losses))), 2):
        totals = [sum(side[begin:end]) for side in losses]
        counts = {1.0, float(end - begin), *lengths}
        for by in counts | {count / micro for count in counts}:
            if all(_shows(number, total / by) for number, total in zip(pair, totals, strict=True)):
                return True
    return False


def _shows(printed: Decimal, value: float) -> bool:
    """Return whether a printed number equals the value, up to its last printed digit."""
    exponent = int(printed.as_tuple().exponent)
    return exponent < 0 and abs(printed - Decimal(value)) <= Decimal(1).scaleb(exponent)
