"""Split layers' weights over ranks that share samples: tensor parallel.

Each rank of the axis holds a part of each split parameter.

Parameters become DTensors on the mesh axis `tensor`: they are split along a dim (parallel/layout.py), or replicated.
While a module runs, its parameters are this rank's parts, as split tensors (parallel/splits/tensor.py). A split tensor
shows the whole shape to the model's code, and its operators run on parts where that is exact. So no line of the model
changes, and the result is exact for any model. For operators without a rule, tensors are gathered, and a note says so.

Replicated parameters and whole activations are the same on all ranks of the axis, and so are their gradients: where a
whole tensor becomes split, the backward sums the gradients of all ranks (parallel/splits/crossing.py).
"""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from meshwise.parallel.blocks import blocks_to_recompute, called_in, repeated_blocks
from meshwise.parallel.layout import cuts_of
from meshwise.parallel.mesh import make_mesh
from meshwise.parallel.rebind import register_model_load_hooks
from meshwise.parallel.splits import rules
from meshwise.parallel.splits.axis import Axis, MeshAxis, SplitPart
from meshwise.parallel.splits.crossing import entering_once, gather_over
from meshwise.parallel.splits.tensor import split
from meshwise.parallel.technique import Setup, Technique
from meshwise.spec.errors import PlanError
from meshwise.spec.words import some
from meshwise.torch_compat.compiling import unwrapped
from meshwise.torch_compat.modules import (
    around_pre_hooks,
    has_pre_hooks,
    parameters_in,
    put_around_methods,
    put_forward,
    renew_flat_weights,
)
from meshwise.torch_compat.sharding import division, packed
from meshwise.torch_compat.whole_values import plain_loss, read_whole
from meshwise.transfer import stages
from meshwise.transfer.reading import look_out, meet, together
from meshwise.transfer.sharded import placed

AXIS = "tensor"
LITTLE = 0.5
"""If a plan splits less than this fraction of the parameters, a note says that the plan saves little memory."""
UNDIVIDED = "this plan divides little: "
"""The beginning of the note on a plan that splits few parameters."""
SPLIT = (nn.Linear, nn.Embedding, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.MultiheadAttention)


def _apply(setup: Setup) -> None:
    rules.prepare()
    whole_mesh = make_mesh(setup.plan, setup.world)
    mesh, axis = whole_mesh[AXIS], MeshAxis.of(whole_mesh, AXIS, sequence=setup.plan.sequence)
    # Pack dim 0 only without shard, because torch cannot express two splits of the same dim.
    cuts = cuts_of(setup.model, mesh.size(), packed=setup.plan.shard == 1)
    known: dict[int, nn.Parameter] = {}
    absent = stages.absent_parameters(setup.model)
    for module in setup.model.modules():
        for name, p in list(parameters_in(module).items()):
            if p is not None and p not in absent:
                if name == "weight" and id(p) in cuts and cuts[id(p)].gathered:
                    put_forward(module, functools.partial(_gathered, module.forward))
                if id(p) not in known:
                    cut = cuts.get(id(p))
                    placement = Replicate() if cut is None else packed(cut.dim, cut.sections)
                    known[id(p)] = placed(p, mesh, [placement])
                module.register_parameter(name, known[id(p)])
    register_model_load_hooks(setup.model)
    read_whole(mesh, meet)
    look_out()
    setup.plain = functools.partial(_plain, mesh)
    # With `selective`, a block must make its parts itself, so that its recomputation runs the same operators.
    again = blocks_to_recompute(unwrapped(setup.model)) if setup.plan.recompute == "selective" else []
    for root in called_in(setup.model):
        blocks = {root, *(block for _, block in [*repeated_blocks(root), *again])}
        for module in root.modules():
            owners = tuple(own for own in _modules(module, blocks) if parameters_in(own))
            if any(True for _ in module.parameters()):
                around = entering_once if module in blocks else contextlib.nullcontext
                put_forward(module, functools.partial(_run, module, owners, axis, around, module.forward))
                if has_pre_hooks(module) and parameters_in(module):
                    around_pre_hooks(module, functools.partial(_localise, [module], axis), _put_back)
            if module is root and setup.plan.pipeline == 1:
                put_around_methods(root, functools.partial(_around_method, owners, axis))
    setup.notes.append(_share(setup.model, mesh.size()))


def _share(model: nn.Module, ranks: int) -> str:
    """Return a note that says which share of the parameters is split."""
    split_of: dict[bool, int] = {False: 0, True: 0}
    whole: Counter[str] = Counter()
    stacked = False
    for name, p in model.named_parameters():
        is_split = isinstance(p, DTensor) and not p.placements[0].is_replicate()
        split_of[is_split] += p.numel()
        if not is_split:
            owner = model.get_submodule(name.rpartition(".")[0])
            whole[f"{name} ({type(owner).__name__})"] += p.numel()
            stacked |= p.dim() == 3 and not isinstance(owner, SPLIT)
    share = split_of[True] / max(sum(split_of.values()), 1)
    text = f"tensor={ranks}: {share:.0%} of the parameters are split."
    if share >= LITTLE:
        return text
    needed = f"expert={ranks}, which divides stacked experts, or " if stacked else ""
    return (
        f"{UNDIVIDED}{text} Every rank keeps these whole: {some([name for name, _ in whole.most_common()])}. Only "
        f"weights of nn.Linear, nn.Embedding, nn.Conv1d to nn.Conv3d and nn.MultiheadAttention that {ranks} divides "
        f"are split. Use these layers, or a plan with {needed}shard={ranks}, which divides any parameter."
    )


def _gathered(forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    return gather_over(AXIS, forward(*args, **kwargs))


def _plain(mesh: DeviceMesh, loss: Tensor) -> Tensor:
    """Return a loss as a plain tensor."""
    with together():
        plain = plain_loss(loss, mesh)
    return loss if plain is None else plain


def _run(
    module: nn.Module,
    owners: Sequence[nn.Module],
    axis: Axis,
    around: Callable[[], contextlib.AbstractContextManager[None]],
    forward: Callable[..., Any],
    /,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Run the forward of `module` with this rank's parts in place of its parameters."""
    if any(isinstance(p, DTensor) and p.device_mesh.ndim > 1 for p in parameters_in(module).values()):
        raise PlanError(
            f"tensor={axis.size} with data or shard: parameters are gathered only while model(x) or a block runs, but "
            "this code calls another method or a layer directly. Call it in the model's forward, or use tensor alone."
        )
    changed = _localise(owners, axis)
    try:
        with around():
            return forward(*args, **kwargs)
    finally:
        _put_back(changed)


def _around_method(
    owners: Sequence[nn.Module], axis: Axis, output: list[Any]
) -> contextlib.AbstractContextManager[None] | None:
    held = any(isinstance(p, DTensor) for own in owners for p in parameters_in(own).values())
    return _localised(owners, axis) if held else None


@contextlib.contextmanager
def _localised(owners: Sequence[nn.Module], axis: Axis) -> Iterator[None]:
    changed = _localise(owners, axis)
    try:
        with entering_once():
            yield
    finally:
        _put_back(changed)


def _put_back(changed: Sequence[tuple[nn.Module, dict[str, Tensor | None]]]) -> None:
    for own, held in changed:
        parameters_in(own).update(held)
        renew_flat_weights(own)


def _localise(owners: Sequence[nn.Module], axis: Axis) -> list[tuple[nn.Module, dict[str, Tensor | None]]]:
    """Replace parameters of `owners` with this rank's parts. Return what `_put_back` needs."""
    changed: list[tuple[nn.Module, dict[str, Tensor | None]]] = []
    local: dict[int, Tensor] = {}
    for own in owners:
        held = {n: p for n, p in parameters_in(own).items() if isinstance(p, DTensor) and p.device_mesh.ndim == 1}
        if held:
            changed.append((own, dict(held)))
            for name, p in held.items():
                if id(p) not in local:
                    local[id(p)] = _part_of(p, axis)
                parameters_in(own)[name] = local[id(p)]
            renew_flat_weights(own)
    return changed


def _modules(module: nn.Module, blocks: set[nn.Module]) -> Iterator[nn.Module]:
    """Yield `module` and the modules inside it, except modules in `blocks` and the modules inside these."""
    yield module
    for child in module.children():
        if child not in blocks:
            yield from _modules(child, blocks)


def _part_of(p: DTensor, axis: Axis) -> Tensor:
    """Return this rank's part of a parameter: a split tensor, or the plain whole tensor if the parameter is
    replicated."""
    divided, local = division(p.placements[-1]), p.to_local()
    local = local.view_as(local) if local.is_leaf else local
    if divided is None:
        if local.requires_grad:  # two parameters that are added may get the same tensor as gradient
            local.register_hook(Tensor.clone)
        return local
    dim, sections = divided
    found = split(local, SplitPart(axis, dim, p.shape[dim], sections))
    found.of_parameter = True  # type: ignore[attr-defined]
    return found


TENSOR = Technique(apply=_apply)
