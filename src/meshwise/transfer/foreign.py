"""Detect collectives that the program calls itself.

Tensors that it has reduced are then known as such.

Backends count what is begun in them, whoever calls. While a `Foreign` is open, our own collectives note how many of
those were theirs; while none is (`OPEN` is empty), they pay for one look at it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from meshwise.compat.collectives import begun

OPEN: list[Foreign] = []


class Foreign:
    """Counts collectives from its creation until `close`."""

    def __init__(self) -> None:
        self.ours = 0
        self._begun = begun()
        OPEN.append(self)

    def close(self) -> bool:
        """Stop, and return whether the program has called a collective of its own meanwhile."""
        OPEN.remove(self)
        return begun() - self._begun > self.ours


@contextlib.contextmanager
def ours() -> Iterator[None]:
    """Count the collectives of the body as our own. Do not nest it."""
    before = begun()
    try:
        yield
    finally:
        count = begun() - before
        for foreign in OPEN:
            foreign.ours += count
