"""Split the sequence: each rank holds some positions of every sample.

This is context parallelism through the whole model.

The inputs of the model's forward are split along their positions (dim 1) into split tensors
(parallel/splits/tensor.py), which show the whole shape to the model's code. Embeddings, layers, norms and the loss
process each position on the rank that holds it. Attention passes keys and values around the ranks
(parallel/splits/attention.py). Any other operator that mixes positions gathers them first, and a note says so. So no
line of the model changes, and the result is exact for any model.

Parameters are whole on every rank. A rank's gradients come from its own positions only, so they are summed over the
axis as soon as they are computed (parallel/splits/crossing.py), and all ranks then have the same gradients. With
`tensor`, each rank has parts of the parameters too, and tensors that are split along positions are also split along
heads or features.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from meshwise.parallel.blocks import called_in
from meshwise.parallel.mesh import make_mesh
from meshwise.parallel.splits import rules
from meshwise.parallel.splits.axis import Axis, MeshAxis, SplitPart
from meshwise.parallel.splits.crossing import scatter
from meshwise.parallel.technique import Setup, Technique
from meshwise.spec.errors import PlanError
from meshwise.torch_compat.modules import put_forward

AXIS = "context"


def _apply(setup: Setup) -> None:
    rules.prepare()
    axis = MeshAxis.of(make_mesh(setup.plan, setup.world), AXIS)
    for root in called_in(setup.model):
        put_forward(root, functools.partial(_run, root, axis, root.forward))
    setup.notes.append(f"context={axis.size}: each rank has about 1/{axis.size} of the positions of every sample.")


def _run(model: nn.Module, axis: Axis, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Run the model's forward on this rank's part of each sequence."""
    names = _names(forward, len(args))
    given = {**dict(zip(names, args, strict=True)), **kwargs}
    divided = {name: value for name, value in given.items() if _has_positions(name, value)}
    if not divided:
        shapes = ", ".join(f"{name} {tuple(value.shape)}" for name, value in given.items() if isinstance(value, Tensor))
        raise PlanError(
            f"context={axis.size} divides sequences, but {type(model).__name__} was called with "
            f"{shapes or 'no tensor'}. Call it with token ids (B, T) or hidden vectors (B, T, width), "
            "or use data or shard instead of context."
        )
    given |= {name: scatter(x, SplitPart(axis, 1, x.shape[1]).folded()) for name, x in divided.items()}
    return forward(*[given.pop(name) for name in names], **given)


def _names(forward: Callable[..., Any], count: int) -> list[str]:
    """Return the names of the first `count` positional parameters of a forward."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    named = [name for name, p in inspect.signature(forward).parameters.items() if p.kind in kinds]
    return [*named, *(f"input {number}" for number in range(len(named), count))][:count]


def _has_positions(name: str, value: Any) -> bool:
    """Return whether an input of the model is split along its positions."""
    if not isinstance(value, Tensor) or "mask" in name or "label" in name or value.dim() < 2:
        return False
    return value.dim() == (3 if value.is_floating_point() else 2)


CONTEXT = Technique(apply=_apply)
