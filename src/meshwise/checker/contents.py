"""Sketch each sample of a batch, to compare what ranks read.

A sketch is a random projection of the sample's values, which are the same whichever rank reads it. Only tensors with
one row for each sample are compared, if the rows have the same width.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from types import ModuleType
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.utils.data import default_collate

from meshwise.checker.difference import LIMIT, Difference
from meshwise.checker.outputs import rows_difference
from meshwise.checker.sketches import row_sketches
from meshwise.checker.trace import Contents, Reading, StepTrace
from meshwise.spec.user_code import place_of, user_place
from meshwise.torch_compat.tree import tensors_in

GENERATORS = (numpy.random.Generator, numpy.random.RandomState, random.Random, torch.Generator)
DEPTH, MANY = 4, 16  # limits of the search for a generator in a data set: nesting depth, length of a list


def reading_of(data: Any, collate: Any = None) -> Reading:
    """Describe a data set, and the function that collates its samples into a batch."""
    read: Any = getattr(type(data), "__getitem__", None) or getattr(type(data), "__iter__", None)
    code = getattr(read, "__code__", None)
    names = () if code is None else code.co_names
    named = [name for name in names if isinstance(read.__globals__.get(name), GENERATORS)]
    where = f" ({at})" if (at := place_of(read)) else ""
    function = "" if collate in (None, default_collate) else getattr(collate, "__name__", type(collate).__name__)
    return Reading(f"{type(data).__name__}{where}", named[0] if named else _held(data, type(data).__name__), function)


def _held(thing: Any, name: str, deep: int = DEPTH) -> str:
    """Return the path of a random generator that an object holds, such as `Data.rng`."""
    if isinstance(thing, GENERATORS):
        return name
    if isinstance(thing, type | ModuleType | nn.Module | Tensor):
        return ""
    if isinstance(thing, list | tuple) and len(thing) <= MANY:
        parts = [(f"[{number}]", part) for number, part in enumerate(thing)]
    else:
        parts = [(f".{key}", part) for key, part in getattr(thing, "__dict__", {}).items()]
    found = (_held(part, f"{name}{key}", deep - 1) for key, part in parts if deep)
    return next((each for each in found if each), "")


def contents_of(microbatch: int, batch: Any, rows: int, reading: Reading) -> Contents:
    """Describe this rank's part of a batch: the tensors with exactly `rows` rows."""
    fields = {
        name: (tuple(tensor.shape[1:]), row_sketches(tensor.detach()))
        for name, tensor in _tensors(batch)
        if type(tensor) is Tensor and tensor.layout == torch.strided and tensor.dim() and len(tensor) == rows
    }
    return Contents(microbatch, user_place(), reading, fields)


def _tensors(batch: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a batch, each with its name, such as `batch['x']`."""
    parts: list[tuple[str, Any]] = [("batch", batch)]
    if isinstance(batch, Mapping):
        parts = [(f"batch[{key!r}]", part) for key, part in batch.items()]
    elif isinstance(batch, list | tuple):
        parts = [(f"batch[{number}]", part) for number, part in enumerate(batch)]
    for name, part in parts:
        for number, tensor in enumerate(tensors_in(part)):
            yield (f"{name}, tensor {number + 1}" if number else name), tensor


def compared_contents(step: int, mine: StepTrace, other: StepTrace) -> Iterator[Difference]:
    """Compare the tensors of the batches of one step on one device with the same tensors on the ranks."""
    for number, sides in enumerate(zip(mine.samples, other.samples, strict=False)):
        one, ranks = ([each for each in side.contents if each.microbatch == number] for side in (mine, other))
        samples = [[index for part in side for index in part] for side in sides]
        if len(one) == 1 and ranks and sorted(samples[0]) == sorted(samples[1]):
            yield from _compared_fields(step, one[0], ranks, *samples)


def _compared_fields(
    step: int, one: Contents, ranks: Sequence[Contents], samples: Sequence[int], of_ranks: Sequence[int]
) -> Iterator[Difference]:
    at = {sample: number for number, sample in enumerate(of_ranks)}
    for name, (width, mine) in one.fields.items():
        parts = [part.fields[name] for part in ranks if name in part.fields and part.fields[name][0] == width]
        theirs = torch.cat([rows for _, rows in parts]) if parts else mine[:0]
        if len(mine) == len(theirs) == len(samples):
            theirs = theirs[[at[sample] for sample in samples]]
            far = [rows_difference(a[None], b[None]) for a, b in zip(mine, theirs, strict=True)]
            wrong = [sample for sample, size in zip(samples, far, strict=True) if not size <= LIMIT]
            facts = {
                "microbatch": one.microbatch + 1,
                "sample": wrong[0],
                "how many": f"{len(wrong)} of {len(samples)}",
                "from the first": of_ranks[0] in wrong,
                "place": ranks[0].place,
                **asdict(ranks[0].reading),
            } if wrong else {}  # fmt: skip
            yield Difference("batch contents", step, name, max(far), facts)
