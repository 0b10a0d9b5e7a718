"""What a backward under a plan promises, whichever technique reduces its gradients.

Tested in tests/parallel/test_equal_steps.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from torch import Tensor


class Reduction(Protocol):
    """Makes of every rank's gradients their mean. `DataParallel` and `Sharded` are such; every rank calls it alike."""

    unreduced: bool
    """Whether gradients of this rank alone wait to be reduced."""

    def backward(
        self,
        loss: Tensor,
        *,
        reduce: bool = True,
        factor: Callable[[], Tensor] | None = None,
        whole: bool = False,
        value: Tensor | None = None,
    ) -> Tensor | None:
        """Add the gradient of `loss` to `.grad`: with `reduce` the mean over ranks, else of this rank alone; it waits.

        factor: gives a scalar that multiplies what this backward adds; with `whole`, all that `.grad` then holds. It is
            asked for when the first gradients are ready, so that it can be on its way meanwhile.
        value: a detached scalar whose mean over ranks is returned.
        """
        ...

    def reduce_now(self) -> None:
        """Reduce what waits: for gradients that every backward so far kept local. Collective."""
        ...

    def close(self) -> None:
        """Let go of the parameters."""
        ...
