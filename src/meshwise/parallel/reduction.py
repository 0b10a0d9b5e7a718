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
    """Return the dtype in which gradients are reduced, or None if it is the stored dtype."""
    return TORCH[dtypes.reduced] if dtypes.reduced != dtypes.stored else None


def reached_parameters(loss: Tensor) -> set[int]:
    """Return the ids of the leaf tensors in the autograd graph of `loss`."""
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


SKIPPED = "If the model skips layers at random (LayerDrop), --exact-random makes every rank skip the same layers."


class Reduction(Protocol):
    """An object that averages gradients over the ranks. Every rank makes the same calls. See `DataParallel` and
    `Sharded`."""

    unreduced: bool
    """Whether this rank has gradients that have not been reduced yet."""
    shared_terms: bool
    """Whether a loss used sharded parameters. All ranks then have equal weight, since gradients are means."""

    def backward(
        self,
        loss: Tensor,
        *,
        reduce: bool = True,
        factor: Callable[[], Tensor] | None = None,
        whole: bool = False,
        value: Tensor | None = None,
    ) -> Tensor | None:
        """Run the backward of `loss` and add its gradient to `.grad`.

        With `reduce`, the mean over ranks is added. Otherwise this rank's own gradient is added, to be reduced later.

        factor: returns a scalar that multiplies the gradient that this backward adds or, with `whole`, everything that
            `.grad` then holds. It is called when the first gradients are ready, so that the factor can be sent
            meanwhile.
        value: a detached scalar or a short vector. Its mean over ranks is returned.
        """
        ...

    def plain(self, loss: Tensor) -> Tensor:
        """Return a loss as a plain tensor, even if it was a DTensor. Collective if the loss contains parameter
        shards."""
        ...

    def reduce_now(self) -> None:
        """Reduce the gradients of this rank that earlier backwards have left unreduced. Collective."""
        ...

    def close(self) -> None:
        """Drop the references to parameters, so that they can be freed."""
        ...
