"""Exact draws: every rank draws its rows of what one device would draw, so that dropout is the same on N devices.

Attention runs as operators, whose draws can be keyed; those of its kernels cannot.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch.nn.attention import SDPBackend, sdpa_kernel

from meshwise.training.keyed import KeyedDraws, Rows, by_rows
from meshwise.training.order import BatchSlice


class ExactDraws:
    """The random draws of a run, a microbatch at a time."""

    def __init__(self) -> None:
        self.unkeyed: set[str] = set()
        """Operators that could not be keyed, so that ranks draw on their own."""

    def of_microbatch(self, key: tuple[int, int, int], part: BatchSlice) -> MicrobatchDraws:
        """The draws of this rank's `part` of a microbatch; key: seed, step, and its number in the step."""
        rows = Rows(part.first, len(part.indices), part.micro, part.samples)
        return MicrobatchDraws(KeyedDraws(key, rows, by_rows(rows)), self.unkeyed)


class MicrobatchDraws:
    """The draws of one microbatch: the same in its forward, and where its backward recomputes parts of that."""

    def __init__(self, draws: KeyedDraws, unkeyed: set[str]) -> None:
        self._draws, self._unkeyed = draws, unkeyed

    @contextlib.contextmanager
    def forward(self) -> Iterator[None]:
        with sdpa_kernel(SDPBackend.MATH), self._draws.forward():
            yield
        self._unkeyed |= self._draws.unkeyed

    @contextlib.contextmanager
    def backward(self) -> Iterator[None]:
        with sdpa_kernel(SDPBackend.MATH), self._draws.backward():
            yield
