"""Compare the outputs of modules on ranks with those on one device.

The samples of all ranks are concatenated first. A program may divide the work of a module by hand: if ranks with the
same samples have different outputs of it, these are not compared.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import dropwhile
from typing import Any

import torch
from torch import Tensor

from meshwise.checker.difference import FLOOR, LIMIT, Difference, apart, largest, ratio
from meshwise.checker.trace import OUTSIDE, Output, StepTrace

PARTS = "ranks that have the same samples have different outputs of it"


def output_difference(one: Output, ranks: Sequence[Output]) -> float | None:
    """Return a call's relative difference, or None if it is unknown whether its rows are samples."""
    for layout, dim in (("0", 0), ("1", 1)):
        parts = [rank.sketches[layout] for rank in ranks if layout in rank.sketches]
        if layout in one.sketches and len(parts) == len(ranks) and _fits(one, ranks, dim):
            mine = one.sketches[layout]
            if sum(map(len, parts)) == len(mine):
                found = rows_difference(mine, torch.cat(parts))
                return None if found > LIMIT and _same_rows(one, ranks) else found
    sizes = []
    if "each" in one.sketches and _fits(one, ranks, 0, padded=True):
        each = [rank.sketches["each"] for rank in ranks if "each" in rank.sketches]
        sizes = _positions_difference(one.sketches["each"], each)
    if not _all_equal(sizes) and all(rank.shape == one.shape for rank in ranks):  # each rank may have the whole output
        sizes = [rows_difference(one.sketches["whole"], rank.sketches["whole"]) for rank in ranks]
    return max(sizes) if _all_equal(sizes) else None  # if ranks differ, it is unknown whether rows are samples


def _same_rows(one: Output, ranks: Sequence[Output]) -> bool:
    """Return whether the ranks together have the same rows as one device, in any order."""
    parts = [rank.sketches["unordered"] for rank in ranks if "unordered" in rank.sketches]
    if "unordered" not in one.sketches or len(parts) < len(ranks):
        return False
    return rows_difference(one.sketches["unordered"], torch.stack(parts).sum(0)) <= LIMIT


def _all_equal(sizes: Sequence[float]) -> bool:
    return bool(sizes) and max(sizes) <= LIMIT


def _fits(one: Output, ranks: Sequence[Output], dim: int, padded: bool = False) -> bool:
    """Return whether the shapes are consistent with ranks that divide the output by samples along `dim`."""
    return all(
        len(one.shape) == len(rank.shape) > max(dim, int(padded))
        and one.shape[dim] * rank.rows == rank.shape[dim] * one.rows
        and all(
            a == b or (padded and d == 1 and b < a)
            for d, (a, b) in enumerate(zip(one.shape, rank.shape, strict=True))
            if d != dim
        )
        for rank in ranks
    )


def _positions_difference(mine: Tensor, ranks: Sequence[Tensor]) -> list[float]:
    """Return each rank's difference from one device, by positions (e.g. tokens), up to the rank's length."""
    if sum(map(len, ranks)) != len(mine):
        return []
    parts = mine.split([len(part) for part in ranks])
    return [
        rows_difference(part[:, : own.shape[1]].flatten(0, 1), own.flatten(0, 1))
        for part, own in zip(parts, ranks, strict=True)
        if own.numel()
    ]


def rows_difference(mine: Tensor, other: Tensor) -> float:
    """Return the largest relative difference between the rows of two matrices."""
    lengths, difference = mine.norm(dim=1), apart(other, mine).norm(dim=1)
    scale = lengths.nan_to_num(0.0, 0.0).clamp(min=FLOOR * largest([lengths]))
    return ratio(difference, scale)


@dataclass(frozen=True)
class Unseen:
    """A module call with an output that could not be compared, and the reason."""

    step: int
    at: int
    module: str
    kind: str
    why: str


def compared_outputs(
    step: int, mine: StepTrace, other: StepTrace, unseen: list[Unseen], *, by_hand: bool
) -> list[Difference]:
    """Compare the module outputs of a step. Add the outputs that cannot be compared to `unseen`.

    by_hand: whether the program exchanges tensors by itself. It may then divide modules over ranks."""
    theirs: dict[Any, list[Output]] = defaultdict(list)
    for output in other.outputs:
        theirs[output.key].append(output)
    found = list[Difference]()
    for at, output in enumerate(mine.outputs):
        ranks = theirs[output.key]
        size = output_difference(output, ranks) if ranks else None
        if by_hand and other.rank_divergence.get(("module outputs", output.module), 0.0) > LIMIT:
            unseen.append(Unseen(step, at, output.module, output.kind, PARTS))
        elif size is None:
            single = math.prod(output.shape) == 1
            why = "one number of the whole batch, such as a loss in it" if single else "not that of single samples"
            why = why if ranks else "under the plan its forward hooks saw no such call"
            unseen.append(Unseen(step, at, output.module, output.kind, why))
        else:
            facts = {"class": output.kind, "microbatch": output.microbatch + 1, "call": output.number + 1, "at": at}
            found.append(Difference("module outputs", step, output.module, size, facts))
    return found


def traced_back(outputs: list[Difference], mine: StepTrace, other: StepTrace) -> list[Difference]:
    """Put the module whose own forward made a wrong input in the place of the first module with wrong outputs."""
    first = next((number for number, d in enumerate(outputs) if d.fault), None)
    if first is None:
        return outputs
    found = outputs[first]
    calls = mine.outputs[found.facts["at"] :]
    while calls and (wrong := _wrong_input(calls[0], other.outputs)) is not None:
        facts = {**found.facts, "passed to": calls[0].module}
        calls = list(dropwhile(lambda call: call.key[:2] != wrong.key[:2], calls[1:]))  # the call around it
        kind, name = ("model inputs", "") if wrong.module == OUTSIDE else ("module outputs", wrong.module)
        found = replace(found, kind=kind, name=name, facts=facts | {"class": calls[0].kind if calls else ""})
    return [*outputs[:first], found, *outputs[first + 1 :]]


def _wrong_input(one: Output, others: Iterable[Output]) -> Output | None:
    """Return the first input of a call that differs under the plan."""
    ranks = [other.inputs for other in others if other.key == one.key]
    sides: Iterator[tuple[Output, ...]] = zip(one.inputs, *ranks, strict=False)
    for given, *parts in sides:
        if parts and (output_difference(given, parts) or 0.0) > LIMIT:
            return given
    return None


def of_samples(outputs: Iterable[Difference], unseen: list[Unseen]) -> Iterator[Difference]:
    """Yield the module outputs that agree, and add the others to `unseen`."""
    for difference in outputs:
        if difference.fault:
            why = "its rows are not those of the samples, since nothing made of them differs"
            at, kind = difference.facts["at"], difference.facts["class"]
            unseen.append(Unseen(difference.step, at, difference.name, kind, why))
        else:
            yield difference
