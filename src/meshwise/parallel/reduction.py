"""Define how a plan reduces gradients after a backward.

Every technique that reduces gradients follows this protocol.

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
    """Return the dtype in which gradients are reduced; None if it is the stored dtype."""
    return TORCH[dtypes.reduced] if dtypes.reduced != dtypes.stored else None


def reached_parameters(loss: Tensor) -> set[int]:
    """Return the ids of the leaf tensors that the autograd graph of `loss` reaches."""
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
    """Averages gradients over the ranks; every rank makes the same calls. See `DataParallel`, `Sharded`."""

    unreduced: bool
    """Whether gradients of this rank wait to be reduced."""
    shared_terms: bool
    """Whether a loss had terms of parameters: their gradients are means over ranks already, so ranks weigh alike."""

    def backward(
        self,
        loss: Tensor,
        *,
        reduce: bool = True,
        factor: Callable[[], Tensor] | None = None,
        whole: bool = False,
        value: Tensor | None = None,
    ) -> Tensor | None:
        """Add the gradient of `loss` to `.grad`: with `reduce` the mean over ranks, else this rank's, to reduce later.

        factor: returns a scalar that multiplies what this backward adds; with `whole`, all that `.grad` then holds. It
        is called when the first gradients are ready, so that it can be sent meanwhile.
        value: a detached scalar, or a short vector, whose mean over ranks is returned.
        """
        ...

    def plain(self, loss: Tensor) -> Tensor:
        """Return a loss as a plain tensor, also if it was a DTensor. Collective if it contains parameter shards."""
        ...

    def reduce_now(self) -> None:
        """Reduce the gradients of this rank that earlier backwards have left unreduced. Collective."""
        ...

    def close(self) -> None:
        """Release the references to parameters."""
        ...
