"""Warn of sums over a DataLoader that was not distributed.

Every rank reads the whole of such a loader, so `mw.sum` counts it once a rank.

It warns only when certain: the newest batch came from such a loader, every rank has read the same samples from it, in
any order, and every rank sums the same value. Loaders that the program itself divides among ranks, such as by a
DistributedSampler, give ranks different samples, and no warning.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import sys
import threading
import weakref
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import torch
from torch import Tensor

from meshwise.compat.program_calls import after_batches
from meshwise.compat.reducer import default_store
from meshwise.compat.tree import all_leaves
from meshwise.engine.engine import Engine
from meshwise.engine.loops import Loops, WholeRead
from meshwise.spec.user_code import OURS, user_place
from meshwise.spec.world import World

COUNTED = (
    "{place}: this loop reads a DataLoader that was not passed to mw.distribute. Every rank reads all of its data, and "
    "{verb} at {at} counts the data {ranks} times. Write loader = mw.distribute(loader) before the loop."
)
MOST = 5  # comparisons of a loop: where ranks differ once, they do again
LOOKED_AT, OF_A_ROW = 64, 8  # numbers of a value, and of each sample, that are compared
SAME = 1e-5  # relative: sums in another order
_made = itertools.count()  # every rank makes its engines in the same order


class UndistributedLoops:
    """Watches loops over DataLoaders that are not distributed, until `close()`.

    reads: the record of this rank's loops, in which the newest batch is recorded.
    say: prints a text for the user."""

    def __init__(self, reads: Loops, world: World, say: Callable[[str], None]) -> None:
        self._reads, self.world, self._say = reads, world, say
        self._known: weakref.WeakKeyDictionary[Any, WholeRead] = weakref.WeakKeyDictionary()
        self._key, self._compared = f"meshwise/undistributed/{next(_made)}", 0
        self.said: list[str] = []
        self._thread = threading.get_ident()
        self.close = after_batches(self._given)

    def _given(self, iterator: Any, batch: Any) -> None:
        inside = sys._getframe(2).f_code.co_filename.startswith(OURS)  # of a distributed loader
        if inside or threading.get_ident() != self._thread:  # who reads ahead is at no batch
            return
        loop = self._known.get(iterator)
        if loop is None:
            loop = self._known[iterator] = WholeRead(user_place())
        if loop.compared < MOST:
            loop.batches += 1
            loop.total += sum(map(_total, all_leaves(batch)))
        self._reads.whole = loop

    @contextlib.contextmanager
    def adding(self, verb: str, value: Any) -> Iterator[None]:
        """Inside the `with` block, a collective sums `value` over the ranks. At the end of the block, warn the user if
        the sum counts the same data several times: all ranks read the same data and contribute the same value."""
        loop, ranks = self._reads.whole, self.world.size
        if loop is None or loop.compared == MOST:
            yield
            return
        loop.compared += 1
        self._compared += 1
        store, keys = default_store(), [f"{self._key}/{self._compared}/{rank}" for rank in range(ranks)]
        store.set(keys[self.world.rank], json.dumps([loop.place, [loop.batches, loop.total, *_numbers(value)]]))
        store.check(keys)  # answered once it is there: a store answers no `set`
        yield  # every rank has been in it: what all have written is there
        if store.check(keys) and _are_same([json.loads(store.get(key)) for key in keys]):
            loop.compared = MOST
            self.said.append(COUNTED.format(place=loop.place, verb=verb, at=user_place(), ranks=ranks))
            self._say(self.said[-1])


def _total(leaf: Any) -> float:
    """Return a number that tells whether two ranks hold the same data, whatever the order of the samples."""
    if isinstance(leaf, Tensor) or (isinstance(leaf, numpy.ndarray) and leaf.dtype.kind in "biuf"):
        rows = torch.as_tensor(leaf).detach()
        rows = rows.reshape(len(rows) if rows.dim() else 1, -1) if rows.numel() else rows.reshape(1, 0)
        return rows[:, :: rows.shape[1] // OF_A_ROW + 1].abs().double().sum().item()
    return float(zlib.crc32(repr(leaf).encode())) if isinstance(leaf, str | bytes | int | float) else 0.0


def _numbers(value: Any) -> list[float]:
    """Return numbers by which to compare a value with the same value on another rank."""
    flat = [torch.as_tensor(leaf).detach().reshape(-1) for leaf in all_leaves(value)]
    return [float(abs(number)) for t in flat for number in t[:: len(t) // LOOKED_AT + 1].tolist()]


def _are_same(ranks: list[tuple[str, list[float]]]) -> bool:
    (place, first), *others = ranks
    return all(
        place == other
        and len(first) == len(numbers)
        and all(math.isclose(a, b, rel_tol=SAME) for a, b in zip(first, numbers, strict=True))
        for other, numbers in others
    )


def watch(engine: Engine) -> None:
    """Add the guard `UndistributedLoops` to an engine that runs a script on several ranks. Do nothing for the engine of
    a job, or on one device."""
    if engine.script and engine.world.size > 1:
        loops = UndistributedLoops(engine.reads, engine.world, engine.notify)
        engine.events.listen(loops)  # no event: batches come from torch's loaders
        engine.ends.callback(loops.close)
