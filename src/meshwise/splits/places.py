"""Cut, pick, pad and join along the split dim.

Each rank keeps the entries that it holds, so no entries are sent, and the parts may become unequally long. If the split
dim has several runs (`SplitPart.repeats`), only whole runs can be cut out.

Tested in tests/splits/test_split_rules.py and tests/parallel/test_split_context.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from meshwise.splits.axis import Range, SplitPart
from meshwise.splits.crossing import add_up, scatter
from meshwise.splits.rule import NoRule
from meshwise.splits.tensor import SplitTensor, is_split, whole_shape


def cut(x: SplitTensor, begin: int, end: int) -> tuple[Tensor, SplitPart]:
    """Take the entries from `begin` to `end` of the split dim. Return this rank's part of them, and how the result is
    split.

    If `repeats` of the split is above 1, only whole sections can be taken (see `SplitPart`). Raises NoRule otherwise.
    """
    part = x.part
    if part.repeats > 1:
        run, held = part.run, part.own // part.repeats
        if begin % run or end % run or begin == end:
            raise NoRule
        new = replace(part, length=end - begin, repeats=(end - begin) // run)
        return x.narrow(part.dim, begin // run * held, new.own), new
    first = sum(min(e, begin) - min(b, begin) for b, e in part.of_rank(part.axis.rank))
    new = part.divided(
        [[(max(b, begin) - begin, min(e, end) - begin) for b, e in each] for each in _pieces(part)], end - begin
    )
    return x.narrow(part.dim, first, new.own), new


def strided(local: Tensor, part: SplitPart, step: int) -> tuple[Tensor, SplitPart]:
    """Take each `step`-th entry of the split dim of a tensor of which `local` is this rank's part. Returns as `cut`."""
    held = _pieces(_one_run(part))
    if step < 1 or max(map(len, held)) > 1:
        raise NoRule
    first = -sum(begin for begin, _ in held[part.axis.rank]) % step
    new = part.divided([[(-(-b // step), -(-e // step)) for b, e in each] for each in held], -(-part.length // step))
    return local[(slice(None),) * part.dim + (slice(first, None, step),)], new


def row(x: SplitTensor, place: int) -> Tensor:
    """Return the entry at index `place` of the split dim, without that dim. The result is whole on each rank."""
    part = _one_run(x.part)
    if not -part.length <= place < part.length:
        raise NoRule  # torch says so
    local, _ = cut(x, place % part.length, place % part.length + 1)
    return add_up(local.sum(part.dim, dtype=local.dtype), part.axis)


def padded(part: SplitPart, pads: list[int], at: int) -> tuple[list[int], SplitPart]:
    """Divide the padding of a whole tensor over the ranks. Return the widths with which this rank pads its part, and
    how the padded tensor is split.

    pads: the widths for the whole tensor, as for `torch.nn.functional.pad`.
    at: the index in `pads` at which the two widths for the split dim begin.
    """
    before, behind = pads[at : at + 2]
    if _one_run(part).length == 0 or before < 0 or behind < 0:
        raise NoRule
    new, own = [], part.axis.rank
    for rank, each in enumerate(_pieces(part)):
        first, last = any(b == 0 for b, _ in each), any(e == part.length for _, e in each)
        pieces = [(b + before, e + before) for b, e in each]
        pieces = [(0, before), *pieces] if first else pieces
        new.append([*pieces, (part.length + before, part.length + before + behind)] if last else pieces)
        if rank == own:
            pads = [*pads[:at], before if first else 0, behind if last else 0, *pads[at + 2 :]]
    return pads, part.divided(new, part.length + before + behind)


def joined(tensors: Sequence[Tensor], like: SplitPart) -> tuple[Tensor, SplitPart]:
    """Concatenate tensors along the split dim of `like`. If one of them is whole, each rank uses its own part of it.

    Returns this rank's part of the result, and how the result is split.
    """
    dim, length, parts = like.dim, 0, []
    pieces: list[list[Range]] = [[] for _ in range(like.axis.size)]
    for each in tensors:
        if is_split(each) and each.part.dim != dim:
            raise NoRule
        long = whole_shape(each)[dim]
        part = _one_run(each.part) if is_split(each) else SplitPart(like.axis, dim, long)
        for rank, held in enumerate(_pieces(part)):
            pieces[rank] += [(b + length, e + length) for b, e in held]
        parts.append((each, part))
        length += long
    local = torch.cat([each if is_split(each) else scatter(each, part) for each, part in parts], dim)
    return local, like.divided(pieces, length)


def _pieces(part: SplitPart) -> list[tuple[Range, ...]]:
    return [part.of_rank(rank) for rank in range(part.axis.size)]


def _one_run(part: SplitPart) -> SplitPart:
    if part.repeats > 1:
        raise NoRule
    return part
