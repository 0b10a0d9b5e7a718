"""Detect collectives that the program calls itself.

From this, meshwise knows that the program may have reduced tensors itself.

Backends count all collectives that begin, whoever calls them. While a `Foreign` counter is open, meshwise counts how
many of these collectives are its own. While no counter is open, meshwise's collectives only look at the empty list
`OPEN`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from meshwise.compat.collectives import begun

OPEN: list[Foreign] = []


class Foreign:
    """A counter of the collectives that begin between its creation and the call of `close`.

    ours: how many of these collectives meshwise has called.
    """

    def __init__(self) -> None:
        self.ours = 0
        self._begun = begun()
        OPEN.append(self)

    def close(self) -> bool:
        """Stop counting. Return whether the program itself has called a collective since the counter was created."""
        OPEN.remove(self)
        return begun() - self._begun > self.ours


@contextlib.contextmanager
def ours() -> Iterator[None]:
    """Count the collectives inside the `with` block as meshwise's own. Such blocks must not be nested."""
    before = begun()
    try:
        yield
    finally:
        count = begun() - before
        for foreign in OPEN:
            foreign.ours += count
