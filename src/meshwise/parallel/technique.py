"""Define a technique: check, apply to a model, bind an optimizer.

Each technique has its own file.

A new technique needs a field of the plan, a file, and a position in the order of `apply.py`. An earlier technique
passes results to a later one in `Setup`: techniques do not import each other.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.optim import Optimizer

from meshwise.spec.dtypes import Dtypes
from meshwise.spec.plan import Plan
from meshwise.spec.world import World

Samples = Callable[[], int | None]
"""Returns the number of samples that this rank works on now: 0 for a padding sample, None outside of batches."""
Cost = Callable[[str, nn.Module], float]
"""Returns the cost of a block, given its name and the block."""


@dataclass
class Setup:
    """A model to which a plan is being applied. Each technique of the plan reads and sets fields, and so passes results
    to later techniques."""

    model: nn.Module
    plan: Plan
    world: World
    samples: Samples | None = None
    piggyback_loss: bool = False
    was_compiled: bool = False
    stage_cost: Cost | None = None
    fill: Callable[[torch.device | str, torch.device | str], None] | None = None
    parts_on_host: bool = False
    gather_dtypes: MixedPrecisionPolicy | None = None
    gathered_narrow: Collection[int] = ()
    reduction: Reduction | None = None
    plain: Callable[[Tensor], Tensor] | None = None
    coupled_gradients: bool = False
    let_go: Callable[[set[str]], list[Any]] | None = None
    own_parts: dict[nn.Module, DeviceMesh] = field(default_factory=dict)
    pipeline: Any = None
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Technique:
    """The functions of a technique. They are called only under a plan that uses the technique (see
    `apply.TECHNIQUES`). A function that is not needed is None."""

    check_model: Callable[[Setup], None] | None = None
    apply: Callable[[Setup], None] | None = None
    bind: Callable[[Optimizer, Plan, World], None] | None = None


CARRIED = 1 + 32  # numbers reduced along with the gradients: the loss, and 32 signs of a checksum (guards/agreed.py)
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
    """Whether a loss so far used sharded parameters directly, as an L2 norm does. All losses then need one scale."""

    def backward(
        self,
        loss: Tensor,
        *,
        reduce: bool = True,
        factor: Callable[[], Tensor] | None = None,
        whole: bool = False,
        value: Tensor | None = None,
        run: Callable[..., None] | None = None,
    ) -> Tensor | None:
        """Run the backward of `loss`, and add the gradients to the `grad` of the parameters.

        reduce: True averages the gradients over the ranks first, which is collective. False adds this rank's own
            gradients, and a later call averages them.
        factor: returns a scalar that multiplies the gradients of this backward. It is called when the first gradients
            are ready. Until then, the ranks can compute the scalar together.
        whole: whether `factor` also multiplies the gradients that earlier backwards have added to `grad`.
        value: a detached scalar or short vector, such as the loss. Its mean over the ranks is returned. Without
            `value`, the result is None.
        run: is called instead of `torch.autograd.backward`, with the same arguments.
        """
        ...

    def plain(self, loss: Tensor) -> Tensor:
        """Return the loss as a plain tensor. A loss that uses sharded parameters directly, e.g. in an L2 norm, may be a
        DTensor. It is converted, and the call is then collective."""
        ...

    def reduce_now(self) -> None:
        """Reduce the gradients of this rank that earlier backwards have left unreduced. Collective."""
        ...

    def close(self) -> None:
        """Drop the references to parameters, so that they can be freed."""
        ...
