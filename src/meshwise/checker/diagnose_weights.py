"""Diagnose wrong loss weights by arithmetic.

The arithmetic uses the scalars that a loss is computed from, and the gradients of each rank.
"""

from __future__ import annotations

import ast
import linecache
from collections.abc import Sequence

from meshwise.checker.causes import Cause
from meshwise.checker.causes import CauseKind as K
from meshwise.checker.evidence import Evidence, near
from meshwise.checker.loss_numbers import Joined, Key, joined
from meshwise.checker.rank_weights import RankWeights, shown, weights_in
from meshwise.spec.words import some

SAY_SUM = "mw.backward(loss, reduction='sum'), or Job(reduction='sum')"
OF_SUM = f"is your loss a sum over samples? Say {SAY_SUM}. Else remove what divides it by the number of ranks."
OF_MEAN = f"is your loss a mean over samples? Leave out {SAY_SUM}, or what multiplies it by the number of ranks."
NONE = 1e-6  # smaller weights count as zero


def by_numbers(evidence: Evidence) -> Cause | None:
    """Name the source line where a loss stops being a mean over samples."""
    plan, numbers = evidence.steps[1], _numbers(evidence)
    if not numbers:
        return None
    loss = numbers[-1]
    if loss.is_sum and not loss.is_mean:
        return Cause(K.LOSS_WEIGHTING, f"the loss adds up over the ranks: {line_of(loss)} is {loss.shown}: {OF_SUM}")
    if loss.is_mean and near(plan.loss, sum(number.value for number in loss.ranks)):
        text = f"the loss is a mean, and the plan adds it up: {evidence.both_numbers()}"
        return Cause(K.LOSS_WEIGHTING, f"{text}: {OF_MEAN}")
    other = not_a_mean(evidence)
    return None if other is None else _no_mean(other, {n.key: n for n in numbers})


def not_a_mean(evidence: Evidence) -> Joined | None:
    """Return the first scalar of the loss that does not follow from the ranks' values."""
    return next((n for n in _numbers(evidence) if not (n.is_mean or n.is_sum or n.is_alike)), None)


def _numbers(evidence: Evidence) -> list[Joined]:
    one, plan = evidence.steps
    counts = [len(part) for part in plan.samples[0] if part] if plan.samples else []
    if len(one.numbers) != 1 or len(plan.numbers) != len(counts) or len(counts) < 2:
        return []
    return list(joined(one.numbers[0], plan.numbers, counts).values())


def _no_mean(number: Joined, known: dict[Key, Joined]) -> Cause | None:
    """Explain why a scalar is not the mean of the ranks' scalars."""
    parts = [known[key] for key in number.one.made_of if key in known]
    means, sums = [p for p in parts if p.is_mean and not p.is_alike], [p for p in parts if p.is_sum and not p.is_mean]
    if number.is_mean_of_its_own:
        over, what = shown(rank.over for rank in number.ranks), _divisor(number)
        text = f"{line_of(number)} is a mean over {number.one.over:g}, and over {over} on the ranks, which have"
        text = f"{text} {some(number.samples)} samples. Say over how much: mw.backward(loss, weight=n), or let a job's"
        return Cause(K.LOSS_WEIGHTING, f"{text} loss return (loss, n), where n is {what} of that line.")
    if number.key[1] in ("mul", "div") and len(parts) == 1 and (means or sums) and number.one.value:
        shares = [each / sum(number.samples) for each in number.samples] if means else [1.0] * len(number.ranks)
        factor = number.weighed(shares) / number.one.value
        text = f"{line_of(number)} is {factor:.6g} times that of one device, where what it multiplies is equal"
        return Cause(K.LOSS_WEIGHTING, f"{text}: this factor depends on the number of ranks or microbatches.")
    if number.key[1] in ("add", "sub") and means and sums:
        added = sums[0]
        while len(added.one.made_of) == 1 and added.one.made_of[0] in known:  # where its computation begins
            added = known[added.one.made_of[0]]
        text = f"{line_of(number)} adds a mean over samples and a sum over them ({added.key[1]} in {added.place}:"
        text = f"{text} {added.shown}). Make both means, or both sums and say {SAY_SUM}."
        return Cause(K.LOSS_WEIGHTING, text)
    return None


def _divisor(number: Joined) -> str:
    """Return the source code of the number by which a line divides, such as `len(batch)`, or "the divisor"."""
    try:
        nodes = list(ast.walk(ast.parse(_line(number.place))))
    except SyntaxError:
        return "the divisor"
    found = [ast.unparse(n.right) for n in nodes if isinstance(n, ast.BinOp) and isinstance(n.op, ast.Div)]
    if number.key[1] == "mean":
        calls = [n.func for n in nodes if isinstance(n, ast.Call) and not n.args and isinstance(n.func, ast.Attribute)]
        found = [f"{ast.unparse(of.value)}.numel()" for of in calls if of.attr == "mean"]
    return found[0] if len(found) == 1 and number.key[1] in ("div", "mean") else "the divisor"


def line_of(number: Joined) -> str:
    """Return where a scalar of the loss is computed: the source line and its code."""
    return f"{number.place} ({_line(number.place) or number.key[1]})"


def _line(place: str) -> str:
    """Return the source code at `place`, which is `FILE:LINE`. Return "" if there is no such line."""
    file, _, line = place.rpartition(":")
    linecache.checkcache(file)
    return linecache.getline(file, int(line)).strip() if line.isdigit() else ""


def by_weights(evidence: Evidence) -> Cause | None:
    """Explain wrong gradients by wrong weights of the ranks."""
    reference, actual = evidence.steps
    found, names = weights_in(reference, actual), list[str]()
    if found is not None and not found.one and (cause := _times_nothing(evidence)):
        return cause
    if found is None or not found.one:
        wrong = [d.name for d in evidence.faults("gradients") if d.name in actual.gradients]
        of_each = {name: weights_in(reference, actual, [name]) for name in wrong}
        found = of_each[wrong[0]] if wrong else None
        names = [name for name, other in of_each.items() if other is not None and _alike(found, other)]
    if found is None or not found.one or not found.plan or not found.unique:
        return None
    return _lost(found, names) or _of_microbatches(found) or _of_ranks(found, names, evidence)


def _times_nothing(evidence: Evidence) -> Cause | None:
    """Explain gradients to which some microbatches contribute nothing."""
    plan = evidence.steps[1]
    zero = {column for column, named in plan.own_gradients.items() if not any(bool(g.any()) for g in named.values())}
    lost = sorted({number + 1 for rank, number in zero if _count(evidence, (rank, number))})
    if not lost or len(lost) == len(plan.samples):
        return None
    text = f"the gradients are those of {len(plan.samples) - len(lost)} of {len(plan.samples)} microbatches"
    return Cause(K.MISSING_REDUCTION, f"{text}: the loss of microbatch {some(lost)} has no gradient.")


def _alike(a: RankWeights | None, b: RankWeights) -> bool:
    if a is None or a.columns != b.columns or not all((a.one, a.plan, b.one, b.plan)):
        return False
    sides = zip(a.one + a.plan, b.one + b.plan, strict=True)
    return all(near(x, y) or abs(x - y) < NONE for x, y in sides)


def _of(names: Sequence[str]) -> str:
    return f"the gradients of {some(names)}" if names else "the gradients"


def _lost(found: RankWeights, names: Sequence[str]) -> Cause | None:
    """Explain gradients that lack those of whole ranks or whole microbatches."""
    columns = found.columns
    lost = [c for c, w, v in zip(columns, found.plan, found.one, strict=True) if abs(w) <= NONE < abs(v)]
    there = [c for c in columns if c not in lost]
    microbatches, of_there = {m for _, m in lost}, {m for _, m in there}
    if there and lost and not microbatches & of_there:
        few = some(sorted(m + 1 for m in microbatches))
        text = f"{_of(names)} are those of microbatch {some(sorted(m + 1 for m in of_there))} alone"
        return Cause(K.MISSING_REDUCTION, f"{text}; {few} is not in them.")
    kept = {rank for rank, _ in there}
    ranks = [rank for rank in found.ranks if rank not in kept]
    if not ranks or not there:
        return None
    text = f"{_of(names)} on rank 0 are those of rank {some(sorted(kept))} alone; rank {some(ranks)} is not in them"
    return Cause(K.MISSING_REDUCTION, f"{text}: they were not reduced, or over another process group.")


def _of_microbatches(found: RankWeights) -> Cause | None:
    """Explain gradients in which microbatches have wrong factors, e.g. 2 and 0.5."""
    ratios: dict[int, float] = {}
    for (_, m), w, v in zip(found.columns, found.plan, found.one, strict=True):
        if abs(v) <= NONE or not near(ratios.setdefault(m, w / v), w / v):
            return None
    weights = list(ratios.values())
    if len(weights) < 2 or all(near(w, weights[0]) for w in weights):
        return None
    text = f"the gradients are those of {len(weights)} microbatches, which weigh {shown(weights)} times what they"
    return Cause(K.LOSS_WEIGHTING, f"{text} should.")


def _of_ranks(found: RankWeights, names: Sequence[str], evidence: Evidence) -> Cause | None:
    """Explain gradients in which ranks have wrong weights."""
    one, plan = found.one, found.plan
    if len(one) < 2 or all(near(v, w) for v, w in zip(one, plan, strict=True)):
        return None
    text = f"{_of(names)} of the ranks weigh {shown(one)} on one device and {shown(plan)} under the plan"
    if all(near(weight, 1) for weight in one):
        if names or evidence.first.kind != "loss":
            text += ": each rank has a part, and one device has their sum. An all_reduce is missing in the backward"
            return Cause(K.MISSING_REDUCTION, f"{text}, or a division is one too many.")
        return Cause(K.LOSS_WEIGHTING, f"{text}, where they are added up: {OF_SUM}")
    counts = [_count(evidence, column) for column in found.columns]
    if not _is_mean(one, evidence):
        return None
    other = not_a_mean(evidence)
    line = f" {line_of(other)} is {other.shown}." if other is not None and not names else ""
    have = f"; they have {some(counts, 8)} samples" if all(counts) else ""
    return Cause(K.LOSS_WEIGHTING, f"{text}{have}.{line}")


def _count(evidence: Evidence, column: tuple[int, int]) -> int:
    """Return a rank's number of samples in a microbatch, 0 if it is unknown."""
    (rank, number), samples = column, evidence.steps[1].samples
    return len(samples[number][rank]) if number < len(samples) and rank < len(samples[number]) else 0


def _is_mean(one: list[float], evidence: Evidence) -> bool:
    """Return whether the loss is a mean of the ranks' losses with these weights."""
    loss = next(reversed(_numbers(evidence)), None)
    alike = loss is None or len(loss.ranks) < len(one) or near(loss.one.value, loss.weighed(one))
    return near(sum(one), 1) and alike
