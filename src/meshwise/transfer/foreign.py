"""Detect collectives that the program calls itself.

So meshwise knows that the program may have reduced tensors itself.

Backends count the collectives begun in them, whoever calls. While a `Foreign` is open, meshwise's collectives count how
many of these were theirs. While `OPEN` is empty, they only look at that list.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from meshwise.compat.collectives import begun

OPEN: list[Foreign] = []


class Foreign:
    """Counts the collectives that begin between its creation and `close`."""

    def __init__(self) -> None:
        self.ours = 0
        self._begun = begun()
        OPEN.append(self)

    def close(self) -> bool:
        """Stop counting; return whether the program has called a collective itself meanwhile."""
        OPEN.remove(self)
        return begun() - self._begun > self.ours


@contextlib.contextmanager
def ours() -> Iterator[None]:
    """Count the collectives inside the `with` block as meshwise's. Do not nest it."""
    before = begun()
    try:
        yield
    finally:
        count = begun() - before
        for foreign in OPEN:
            foreign.ours += count
