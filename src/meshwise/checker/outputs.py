"""Compare the outputs of modules on ranks with those on one device.

The samples of all ranks are concatenated first. A program may divide the work of its modules by hand. Ranks with the
same samples then have equal outputs, slices of the whole output along the sequence dimension (positions) or along the
last dimension (features), or parts of a sum. The same holds for the gradients that reach the outputs.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from meshwise.checker.difference import FLOOR, LIMIT, Difference, apart, largest, numbers, ratio
from meshwise.checker.trace import Output, StepTrace


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


@dataclass(frozen=True)
class Layout:
    """One way in which several ranks may divide a module output along a dimension, such as positions or features."""

    whole: int
    parts: tuple[int, ...]
    order: str
    is_last: bool = field(default=False, compare=False)


ORDERS = ("one after the other", "in turn", "from both ends")
"""How slices go to ranks: contiguous, every n-th slice, or one chunk from each end to balance causal attention."""


def _order(layout: Layout) -> Tensor:
    """Return indices that sort the slices of the whole output by rank."""
    every, ranks = torch.arange(layout.whole), len(layout.parts)
    if layout.order == "in turn":
        return torch.cat([every[rank::ranks] for rank in range(ranks)])
    if layout.order == "from both ends" and layout.whole % (2 * ranks) == 0:
        chunks = every.chunk(2 * ranks)
        return torch.cat([torch.cat([chunks[rank], chunks[-1 - rank]]) for rank in range(ranks)])
    return every


def divided_outputs(one: Output, ranks: Sequence[Output]) -> Iterator[tuple[Layout, float]]:
    """Yield (layout, difference) for each layout in which the ranks may divide a module output."""
    for layout, mine, theirs in divided_rows(one, ranks):
        yield layout, rows_difference(mine, theirs)


def divided_rows(one: Output, ranks: Sequence[Output]) -> Iterator[tuple[Layout, Tensor, Tensor]]:
    """Yield (layout, one device's sketches, ranks' sketches) for each layout in which ranks may divide an output."""
    if len(ranks) < 2:
        return
    last = len(one.shape) - 1
    for dim in {0, min(1, last), last} if one.shape else ():
        parts = [rank.sketches.get(f"along {dim}") for rank in ranks]
        rest = [rank.shape[:dim] + rank.shape[dim + 1 :] for rank in ranks]
        alike = all(other == one.shape[:dim] + one.shape[dim + 1 :] for other in rest)
        found = [part for part in parts if part is not None]
        if f"along {dim}" in one.sketches and alike and len(found) == len(ranks):
            counts = tuple(map(len, found))
            for order in ORDERS if sum(counts) == one.shape[dim] else ():
                layout = Layout(one.shape[dim], counts, order, dim == last)
                yield layout, one.sketches[f"along {dim}"][_order(layout)], torch.cat(found)


def is_sum_of(one: Output, ranks: Sequence[Output]) -> bool:
    """Return whether the ranks' outputs add up to that of one device."""
    if len(ranks) < 2 or any(rank.shape != one.shape for rank in ranks):
        return False
    total = torch.stack([rank.sketches["whole"] for rank in ranks]).sum(0)
    return rows_difference(one.sketches["whole"], total) <= LIMIT


def has_rows_of_samples(one: Output, ranks: Sequence[Output]) -> bool:
    """Return True if the shapes of a module output are consistent with one row per sample."""
    return any(f"{dim}" in one.sketches and _fits(one, ranks, dim) for dim in (0, 1))


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


Ways = list[tuple[Layout, float]]
Groups = Sequence[Sequence[Output]]
"""The output of one module call on all ranks. Each inner list holds the outputs of ranks that have the same samples."""


@dataclass(frozen=True)
class Parts:
    """Possible explanations why ranks with the same samples have different outputs of one module call."""

    whole: float | None
    ways: Ways
    summed: bool


def peers_in(step: StepTrace) -> dict[Any, Groups]:
    """Return the outputs of each module call, in one group for each set of ranks that have the same samples."""
    sides = [[{output.key: output for output in rank} for rank in ranks] for ranks in step.peers]
    first = sides[0][0] if sides else {}
    return {
        key: [[rank[key] for rank in ranks] for ranks in sides]
        for key in first
        if all(key in rank for ranks in sides for rank in ranks)
    }


def parts_of(one: Output, groups: Groups) -> Parts | None:
    """Explain why ranks with the same samples differ in a call, or return None."""
    if all(_alike(ranks[0], other) for ranks in groups for other in ranks[1:]):
        return None
    firsts = [ranks[0] for ranks in groups]
    whole = output_difference(one, firsts) if has_rows_of_samples(one, firsts) else None
    ways = list(divided_outputs(one, groups[0])) if len(groups) == 1 else []
    return Parts(whole, ways, adds_up_to(one, groups))


def adds_up_to(one: Output, groups: Groups) -> bool:
    """Return whether the outputs of ranks that share samples add up to the output of one device."""
    if any(other.shape != ranks[0].shape for ranks in groups for other in ranks):
        return False
    found = output_difference(one, [_total(ranks) for ranks in groups])
    return found is not None and found <= LIMIT


def _total(ranks: Sequence[Output]) -> Output:
    layouts = [layout for layout in ranks[0].sketches if layout != "unordered"]
    return replace(ranks[0], sketches={each: torch.stack([r.sketches[each] for r in ranks]).sum(0) for each in layouts})


def _alike(a: Output, b: Output) -> bool:
    same = a.shape == b.shape and a.sketches.keys() == b.sketches.keys()
    return same and rows_difference(a.sketches["whole"], b.sketches["whole"]) <= LIMIT


@dataclass(frozen=True)
class Unseen:
    """A module call with an output that could not be compared, and the reason."""

    step: int
    at: int
    module: str
    kind: str
    why: str


def compared_outputs(step: int, mine: StepTrace, other: StepTrace, unseen: list[Unseen]) -> list[Difference]:
    """Compare the module outputs of a step. Add the outputs that cannot be compared to `unseen`."""
    theirs: dict[Any, list[Output]] = defaultdict(list)
    for output in other.outputs:
        theirs[output.key].append(output)
    peers, seen = peers_in(other), list[tuple[Output, Parts | None, float | None, Ways]]()
    for one in mine.outputs:
        part = parts_of(one, peers[one.key]) if one.key in peers else None
        size = part.whole if part else output_difference(one, theirs[one.key]) if theirs[one.key] else None
        by_samples = size is not None or has_rows_of_samples(one, theirs[one.key])
        ways = part.ways if part else [] if by_samples else list(divided_outputs(one, theirs[one.key]))
        seen.append((one, part, size, ways))
    layouts = {layout for *_, ways in seen for layout, far in ways if far <= LIMIT}
    found = list[Difference]()
    for at, (output, part, size, ways) in enumerate(seen):
        # A layout in which no output agrees is probably not one that the ranks use.
        near = [(far, not layout.is_last) for layout, far in ways if layout in layouts]
        summed = part is not None and part.summed
        slices, of_positions = min(near, default=(None, False))
        size = math.inf if summed else slices if size is None or (part and slices is not None) else size
        if size is None and is_sum_of(output, theirs[output.key]):
            size = 0.0
        if size is None:
            single = math.prod(output.shape) == 1
            why = "one number of the whole batch, such as a loss in it" if single else "not that of single samples"
            why = why if theirs[output.key] else "under the plan its forward hooks saw no such call"
            unseen.append(Unseen(step, at, output.module, output.kind, why))
        else:
            facts = {"class": output.kind, "microbatch": output.microbatch + 1, "call": output.number + 1, "at": at}
            which = "a sum" if summed else "positions" if of_positions else "features"
            facts |= {"parts": which} if summed or (part and near) else {}
            found.append(Difference("module outputs", step, output.module, size, facts))
    right = not next(numbers("loss", step, {"loss": mine.loss}, {"loss": other.loss})).fault
    for at in reversed(range(len(found))):  # a partial sum is right if the next output (or the loss) is
        if found[at].facts.get("parts") == "a sum" and right:
            found[at] = replace(found[at], relative=0.0)
        right = not found[at].fault
    return found


def of_samples(outputs: Iterable[Difference], unseen: list[Unseen]) -> Iterator[Difference]:
    """Yield the module outputs that agree, and add the others to `unseen`."""
    for difference in outputs:
        if difference.fault:
            why = "its rows are not those of the samples, since nothing made of them differs"
            at, kind = difference.facts["at"], difference.facts["class"]
            unseen.append(Unseen(difference.step, at, difference.name, kind, why))
        else:
            yield difference
