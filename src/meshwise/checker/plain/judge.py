"""Compare the ranks of a plain script with one process.

A plain script is one that does not use meshwise. Tested in tests/checker/test_plain_scripts.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from meshwise.checker.finding import Finding
from meshwise.checker.plain import counts
from meshwise.checker.plain.record import Record
from meshwise.checker.plain.rules import DIVERGED, OF_RANKS, RULES
from meshwise.checker.plain.steps import At, steps_of
from meshwise.checker.proof import PlainProof
from meshwise.spec.words import some
from meshwise.workers.divergence import ADVICE


def judge(script: str, devices: str, ranks: Sequence[Record], one: Record, repeat: Any = list) -> PlainProof:
    """Compare the run of a script on several ranks with its run in one process, and return the result of the check."""
    steps, other_data = list(steps_of(ranks, one)), bool(one.refused) or _reads_others(ranks)
    drawn = [at for at in steps if any(step.draws for step in (*at.ranks, at.one))]
    local = [at for at in steps if at.is_local]
    alone = [at for at in steps if len(ranks) > 1 and at.reads_others]
    found, largest = list[Finding](), 0.0
    for at in steps:
        rules = OF_RANKS if other_data or at in drawn or at in local or at in alone else RULES
        hits = [hit for rule in rules if (hit := rule(at)) is not None]
        largest = max([largest, *(far for far, _ in hits)])
        found += [finding for _, finding in hits[:1] if not found]
    found += _ends_alone(ranks) if not found else ()
    not_judged = [*_not_judged(ranks, one)]
    if local:
        names = some(sorted(set().union(*(at.apart & at.joined for at in local))))
        said = f"step {_numbers(local)}: the ranks step with other gradients of {names},"
        said += " and later have the same values."
        not_judged.append(f"{said} One process cannot repeat such local steps between averages.")
    if drawn:
        said = f"the gradients of step {_numbers(drawn)}: the script draws random numbers"
        not_judged.append(f"{said} between a batch and its backward, and each rank draws others.")
    if alone:
        said = f"step {_numbers(alone)}: one process seems to read other samples than the ranks,"
        not_judged.append(f"{said} and without a DataLoader nothing tells which.")
    shown = list(counts.shown(ranks, one, devices, one))
    if any(finding.wrong for finding in shown):  # a printed number may be a measurement, which differs in a second run
        shown = list(counts.shown(ranks, one, devices, next(iter(repeat()), None) or one))
    if not ranks[0].passes and any(finding.wrong for finding in shown):
        lines = some(place for finding in shown if finding.wrong for place in finding.places)
        not_judged.append(f"what {lines} shows: without a DataLoader nothing tells of which samples it is.")
        shown = [finding for finding in shown if not finding.wrong]
    found = [
        *counts.reads(ranks, one, counts.agrees(ranks[0], one, shown)),
        *found,
        *_scales(ranks),
        *counts.schedule(ranks, one, [(at.ranks[0], at.one) for at in steps]),
        *counts.rates(ranks),
        *counts.norms(ranks),
        *counts.left_over(ranks[0]),
        *([] if _reads_others(ranks) or alone else shown),
    ]
    once = {(each.kind, each.places): each for each in reversed(found)}  # keep the first of each kind and line
    epochs = len({p.number for p in ranks[0].passes if p.trained})
    return PlainProof(script, devices, len(steps), epochs, largest, tuple(reversed(once.values())), tuple(not_judged))


def _numbers(steps: Sequence[At]) -> str:
    return some((at.number for at in steps), 8)


def _ends_alone(ranks: Sequence[Record]) -> Iterator[Finding]:
    """Report a rank that lost the others, which had ended or made another call."""
    for record in ranks:
        if record.lost:
            made = ", ".join(str(len(each.steps)) for each in ranks)
            said = f"rank {record.rank} lost another rank here."
            said += f" The ranks had made {made} steps of their optimizers."
            yield Finding(DIVERGED, True, (record.lost,), said, ADVICE)
            return


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
    unfinite = [n for n, step in enumerate(ranks[0].steps, 1) if not math.isfinite(step.loss)]
    if unfinite:
        yield f"step {some(unfinite, 8)}: the loss is not finite."
    if ranks[0].schedules and not ranks[0].ticked_at:
        yield f"the schedule of {ranks[0].schedules[0]}: its step() was not called."
    if not one.refused and len(one.steps) < len(ranks[0].steps):
        yield f"{len(ranks[0].steps) - len(one.steps)} steps that one process does not make."


def _scales(ranks: Sequence[Record]) -> Iterator[Finding]:
    whole = ranks[0].microbatches
    for step in [each for each in ranks[0].steps if len(each.scales) == whole > 1]:
        if abs(step.scales[-1] * whole * whole - 1) < 1e-6:
            said = f"each of {whole} losses of a step is multiplied by {step.scales[-1]:.6g}, or 1/{whole * whole}."
            instead = "Divide once: accelerator.backward divides by gradient_accumulation_steps itself."
            yield Finding("loss divided by the accumulation twice", True, (step.places[1],), said, instead)
            return
