"""Exact draws: every rank draws its rows of what one device would draw, so that dropout is the same on N devices.

Attention runs as operators, whose draws can be keyed; those of its kernels cannot.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch.nn.attention import SDPBackend, sdpa_kernel

from meshwise.training.keyed import KeyedDraws, Rows, by_rows
from meshwise.training.order import BatchSlice


class StepDraws:
    """The random draws of a step, a microbatch at a time. Without `exact` each rank draws on its own."""

    def __init__(self, *, exact: bool = False) -> None:
        self.exact = exact
        self._now: KeyedDraws | None = None
        self.unkeyed: set[str] = set()
        """Operators that could not be keyed, so that ranks draw on their own."""

    def begin(self, key: tuple[int, int, int], share: BatchSlice) -> None:
        """The next microbatch is this rank's `share`; key: seed, step, and its number in the step."""
        if self.exact:
            rows = Rows(share.first, len(share.indices), share.micro, share.samples)
            self._now = KeyedDraws(key, rows, by_rows(rows))

    @contextlib.contextmanager
    def forward(self) -> Iterator[None]:
        """The microbatch's forward."""
        if self._now is None:
            yield
            return
        with sdpa_kernel(SDPBackend.MATH), self._now.first():
            yield
        self.unkeyed |= self._now.unkeyed

    @contextlib.contextmanager
    def backward(self) -> Iterator[None]:
        """Its backward, which may recompute parts of the forward."""
        if self._now is None:
            yield
            return
        with sdpa_kernel(SDPBackend.MATH), self._now.again():
            yield
