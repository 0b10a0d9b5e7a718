"""Explain which bytes an operation would move, and which placement moves fewer.

The operation runs on tensors without memory; nothing is calculated and no data moves.
"""

from __future__ import annotations

import inspect
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from meshwise.arrays.array import Array, empty_parts
from meshwise.arrays.gathering import guard
from meshwise.arrays.moves import EXPLAINED
from meshwise.arrays.reading import where
from meshwise.arrays.sharding import Sharding, evenly, sharding
from meshwise.spec.errors import UsageError
from meshwise.spec.units import bytes_text
from meshwise.torch_compat.fake import NEEDS_VALUES, plain_mode
from meshwise.transfer.comm_log import CommLog, Transfer, comm_log, table

MOST_ARRAYS = 4
"""The largest number of combinations of placements that `explain` tries is 4 ** MOST_ARRAYS."""


@dataclass(frozen=True)
class Placing:
    """One layout of the arrays that an operation reads, and what the operation costs with this layout."""

    layout: dict[str, str]
    bytes: int
    memory: int


@dataclass(frozen=True)
class Explanation:
    """The result of `mw.explain`.

    moves: the transfers that the operation would make.
    better: the layouts with which fewer bytes would move, best first.
    """

    moves: Sequence[Transfer]
    better: list[Placing]

    @property
    def bytes(self) -> int:
        """The total number of bytes that the explained operation would send between devices."""
        return sum(move.bytes for move in self.moves)

    def __str__(self) -> str:
        lines = [table(self.moves)]
        for placing in self.better[:3]:
            how = "; ".join(f"{name} {words}" for name, words in placing.layout.items())
            lines.append(f"{bytes_text(placing.bytes)} with {how} (these take {bytes_text(placing.memory)})")
        return "\n".join(lines)


def explain(operation: Callable[[], Any]) -> Explanation:
    """Explain what an operation on arrays moves, and which placements would move less: `mw.explain(lambda: x @ y)`.

    The operation is called on tensors without memory, so nothing is computed. Raises UsageError if the operation reads
    the values of an array.
    """
    arrays = _arrays_of(operation)
    if not arrays:
        raise UsageError("explain: the function must use an array, for example mw.explain(lambda: x @ y).")
    if any(x.space.over_ranks for x in arrays.values()):
        raise UsageError("explain does not work over several ranks. In one process, use virtual devices: '4xcpu'.")
    with _without_memory(arrays.values()) as lay:
        log = _moved(operation)
        now = sum(move.bytes for move in log)
        better = []
        for choice in _choices(arrays):
            for x, placed in zip(arrays.values(), choice, strict=True):
                lay(x, placed)
            layout = {name: where(x) for name, x in arrays.items()}
            try:
                found = sum(move.bytes for move in _moved(operation))
            except Exception:  # the operation may not work with every placement
                continue
            if found < now:
                held = sum(part.nbytes for x in arrays.values() for part in x.parts)
                better.append(Placing(layout, found, held))
    better.sort(key=lambda placing: (placing.bytes, placing.memory))
    return Explanation(log[:], better)


def _arrays_of(operation: Callable[[], Any]) -> dict[str, Array]:
    """Return the arrays that a function reads from its closure and globals, by name."""
    found = inspect.getclosurevars(operation)
    return {name: value for name, value in {**found.globals, **found.nonlocals}.items() if isinstance(value, Array)}


@contextmanager
def _without_memory(arrays: Any) -> Iterator[Callable[[Array, Sharding], None]]:
    """Inside the `with` block, replace the parts of arrays with tensors that have a shape but take no memory."""
    before = [(x, x.parts, x.sharding, x.alias) for x in arrays]

    def lay(x: Array, placed: Sharding) -> None:
        x.sharding, x.alias = placed, None
        x.parts = tuple(empty_parts(x, x.shape, placed))

    try:
        EXPLAINED.append(before)
        with plain_mode(), guard("allow"):
            for x, _, placed, _ in before:
                lay(x, placed)
            yield lay
    finally:
        EXPLAINED.pop()
        for x, parts, placed, alias in before:
            x.parts, x.sharding, x.alias = parts, placed, alias
            if alias is not None and alias.source is not None:
                del x.parts  # the next read of `parts` fetches them


def _moved(operation: Callable[[], Any]) -> CommLog:
    try:
        with comm_log() as log:
            operation()
        if not all(math.isnan(move.seconds) for move in log):
            raise UsageError("explain covers only arrays, but this function also copies torch tensors. Leave them out.")
    except (*NEEDS_VALUES, RuntimeError) as error:
        if not isinstance(error, NEEDS_VALUES) and "numpy" not in str(error):
            raise
        raise UsageError(
            "explain does not compute values, but this function reads values. Leave out the lines that read them."
        ) from error
    return log


def _choices(arrays: dict[str, Array]) -> Iterator[tuple[Sharding, ...]]:
    """Yield combinations of shardings to try for the arrays, apart from their present shardings."""
    options = []
    for x in arrays.values():
        places = x.space.places
        dims = [evenly(length, places, dim) for dim, length in enumerate(x.shape)]
        options.append(dict.fromkeys([x.sharding, *dims, sharding(places)]))
    tried = options if math.prod(map(len, options)) <= 4**MOST_ARRAYS else [list(each)[:1] for each in options]
    return itertools.islice(itertools.product(*tried), 1, None)
