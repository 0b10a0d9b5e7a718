"""Define how a plan reduces gradients after a backward.

Every technique uses it.

Tested in tests/parallel/test_equal_steps.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from meshwise.spec.dtypes import Dtypes

TORCH = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def reduced_in(dtypes: Dtypes) -> torch.dtype | None:
    """Return the dtype in which gradients are sent; None if it is the stored one."""
    return TORCH[dtypes.reduced] if dtypes.reduced != dtypes.stored else None


def reached_parameters(loss: Tensor) -> set[int]:
    """Return the ids of the leaves that the graph of `loss` reaches."""
    found: set[int] = set()
    seen: set[object] = set()
    open_nodes = [loss.grad_fn]
    while open_nodes:
        node = open_nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if leaf is not None:
            found.add(id(leaf))
        open_nodes.extend(following for following, _ in node.next_functions)
    return found


SKIPPED = "A model that skips layers at random (LayerDrop) skips the same ones on every rank under --exact-random."


class Reduction(Protocol):
    """Turns the ranks' gradients into their mean; every rank calls it alike. See `DataParallel`, `Sharded`."""

    unreduced: bool
    """Whether gradients of this rank alone wait to be reduced."""
    shared_terms: bool
    """Whether a loss had terms of parameters, whose gradients are already means over ranks: ranks must weigh alike."""

    def backward(
        self,
        loss: Tensor,
        *,
        reduce: bool = True,
        factor: Callable[[], Tensor] | None = None,
        whole: bool = False,
        value: Tensor | None = None,
    ) -> Tensor | None:
        """Add the gradient of `loss` to `.grad`: with `reduce` the mean over ranks, else this rank's, which waits.

        factor: returns a scalar that multiplies what this backward adds; with `whole`, all that `.grad` then holds. It
        is called when the first gradients are ready, so that it can be sent meanwhile.
        value: a detached scalar, or a short vector, whose mean over ranks is returned.
        """
        ...

    def plain(self, loss: Tensor) -> Tensor:
        """Return a loss as a plain tensor, whatever it was computed from. Collective if it has parameter shards."""
        ...

    def reduce_now(self) -> None:
        """Reduce the waiting gradients, which every backward so far has kept local. Collective."""
        ...

    def close(self) -> None:
        """Release the parameters."""
        ...
