"""Check that all ranks run the same program.

A script that reads its rank, or draws from generators seeded by it, would compute different values on each rank,
unnoticed. So in some steps (the first, second, fourth … and each 64th), the guard records the numbers and plain tensors
that each line passes to operators on batches. The ranks compare them at the backward, together with their optimizers'
settings, parameters and generators. Values that only some ranks compute, such as a number to print, are left out.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator
from typing import Any

import numpy
import torch
from torch import Tensor, nn

from meshwise.parallel.splits.elementwise import PLAIN
from meshwise.parallel.splits.rules import READS
from meshwise.parallel.splits.tensor import SplitTensor
from meshwise.parallel.splits.term import Term, heard
from meshwise.spec.errors import UsageError
from meshwise.spec.user_code import user_place
from meshwise.torch_compat.dispatch import rehearsing
from meshwise.training.data.generators import GLOBAL
from meshwise.training.engine.engine import Engine
from meshwise.training.guards.agreed import settings_of
from meshwise.training.guards.replicas import sums_of
from meshwise.transfer import collectives

MOST, EACH, CLOSE, NO_END = 4096, 64, 1e-6, -1e9
QUIET = {*PLAIN.split(), *READS, "size", "numel", "nelement", "__len__", "detach", "clone", "backward", "__setstate__"}
WRITES = ("__setitem__", "copy_")
KINDS = ("torch", "numpy", "random")
Facts = dict[tuple[str, str], list[list[float]]]


class SameProgram:
    """Compares what the ranks of an engine's program compute."""

    def __init__(self, engine: Engine) -> None:
        self._engine, self._facts, self._backwards = engine, Facts(), 0
        engine.ends.callback(heard.clear)
        self._listen()

    def _listen(self) -> None:
        self._facts, self._count = {}, 0
        heard[:] = [self.hear]

    def hear(self, name: str, args: Any, kwargs: Any) -> None:
        """Record the numbers passed to an operator, for the user's line that calls it."""
        if name in QUIET or name.startswith(".") or self._count == MOST:
            return
        own = args[1:] if name in WRITES else args  # skip the tensor that is written: its old contents may be anything
        if numbers := [*_numbers((own, kwargs), 4)]:
            self._count += 1
            self._facts.setdefault((user_place(), name), []).append(numbers)

    def backward_begins(self, *_: Any) -> None:
        """At some backwards, compare the values recorded since the last one. Collective."""
        self._backwards += 1
        if heard and not rehearsing():
            heard.clear()
            self._compare()
        following = self._backwards + 1
        if following % EACH == 0 or (following < EACH and following & (following - 1) == 0):
            self._listen()

    def _compare(self) -> None:
        program, draws = self._engine.program, [zlib.crc32(repr(each.state()).encode()) for each in GLOBAL]
        facts = self._facts, settings_of(program.in_use) + sums_of(program), draws
        signs = collectives.gather_objects(zlib.crc32(repr(facts).encode()))
        if len(set(signs)) == 1:
            return
        first, *others = collectives.gather_objects(facts)
        for rank, other in enumerate(others, 1):
            self._explain(rank, first, other)

    def _explain(self, rank: int, first: Any, other: Any) -> None:
        for key in (each for each in first[0] if each in other[0]):
            for mine, theirs in zip(first[0][key], other[0][key], strict=False):
                if len(mine) != len(theirs) or not all(map(_close, mine, theirs)):
                    texts = {"place": key[0], "name": key[1], "theirs": _shown(theirs), "mine": _shown(mine)}
                    raise UsageError(TEXT.format(rank=rank, **texts))
        for mine, theirs in zip(first[1], other[1], strict=False):
            if mine[:2] == theirs[:2] and mine[2] != theirs[2] and not _close(mine[2], theirs[2]):
                raise UsageError(
                    f"rank {rank} has another {mine[0]} than rank 0: {theirs[2]} for {mine[2]}. {SAME} A "
                    "step of an optimizer or scheduler must not stand under `if mw.rank() == 0`."
                )
        kinds = [kind for kind, mine, theirs in zip(KINDS, first[2], other[2], strict=True) if mine != theirs]
        if kinds:
            text = (
                f"{user_place()}: the generators of {' and '.join(kinds)} stand elsewhere on rank {rank} than on rank "
                f"0. {SAME} Seed them alike on all ranks, and draw on all of them."
            )
            if self._engine.watcher is not None:  # a check draws alike on all ranks, so it cannot compare such numbers
                raise UsageError(text)
            self._engine.notify(text)


def _numbers(tree: Any, depth: int) -> Iterator[float]:
    for each in tree.values() if isinstance(tree, dict) else tree:
        if isinstance(each, (bool, int, float, numpy.number)):
            yield float(each)
        elif isinstance(each, slice):
            ends = (n for n in (each.start, each.stop, each.step) if not isinstance(n, Tensor))
            yield from (NO_END if n is None else float(n) for n in ends)
        elif isinstance(each, (SplitTensor, Term, nn.Parameter)):
            continue
        elif isinstance(each, (Tensor, numpy.ndarray)):
            plain = torch.as_tensor(each).detach()
            if plain.layout is torch.strided and not plain.is_meta and type(plain) is Tensor:
                weights = torch.arange(1, plain.numel() + 1, device=plain.device, dtype=torch.float64)
                yield from (float(n) for n in plain.shape)
                yield float((plain.reshape(-1).to(torch.float64) * weights.sin()).sum())
        elif isinstance(each, (list, tuple, dict)) and depth:
            yield from _numbers(each if isinstance(each, dict) else each[:16], depth - 1)


def _close(mine: Any, theirs: Any) -> bool:
    if isinstance(mine, float) and isinstance(theirs, float):
        return math.isclose(mine, theirs, rel_tol=CLOSE, abs_tol=CLOSE) or (math.isnan(mine) and math.isnan(theirs))
    return bool(mine == theirs)


def _shown(numbers: list[float]) -> str:
    return ", ".join(f"{n:.6g}" for n in numbers[:6]).replace(f"{NO_END:.6g}", "None")


SAME = 'With view="whole" every rank runs the same program on the whole batch.'
TEXT = (
    "{place}: rank {rank} computes something else than rank 0: {name} gets {theirs} there, and {mine} on rank 0. "
    f"{SAME} Read whole data, seed generators alike on all ranks, and choose no rows and numbers by mw.rank()."
)
