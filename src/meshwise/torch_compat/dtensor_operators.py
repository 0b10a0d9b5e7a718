"""Let DTensor's operators take several meshes, and expand strategies once.

In `_foreach_` and fused operators, and in a loss scaler's check, DTensor accepts tensors of one mesh only. Here such an
operator is called once for each mesh. DTensor also expands the sharding strategies of each tensor in a list
separately, which takes milliseconds per tensor, although the parameters of equal blocks have equal strategies, even on
the meshes of other ranks.

Both hooks are private. Based on torch 2.13: `distributed/tensor/_dispatch.py`, `_ops/utils.py`, `_dtensor_spec.py`,
`_op_schema.py`. Strategies of another version are left as they are.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor._op_schema import OpSpec, OpStrategy
from torch.distributed.tensor._ops import utils

_KINDS = ("aten::_foreach_", "aten::_fused_adam", "aten::_fused_sgd", "aten::_fused_adagrad")
_LOOK_AT_GRADIENTS = torch.ops.aten._amp_foreach_non_finite_check_and_unscale_.default


@functools.cache
def take_several_meshes() -> None:
    """From now on, let `_foreach_` and fused operators accept DTensors of several device meshes in one call."""
    dispatcher: Any = DTensor._op_dispatcher
    handlers = dispatcher._custom_op_handlers
    for name in torch._C._dispatch_get_all_op_names():
        if name.startswith(_KINDS):
            name, _, overload = name.removeprefix("aten::").partition(".")
            operator = getattr(getattr(torch.ops.aten, name), overload or "default")
            handlers.setdefault(operator, functools.partial(_by_mesh, handlers, None))
    handlers[_LOOK_AT_GRADIENTS] = functools.partial(_by_mesh, handlers, handlers[_LOOK_AT_GRADIENTS])


def _by_mesh(
    handlers: dict[Any, Any], before: Any, operator: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]
) -> Any:
    """Call the operator once for each device mesh. `before` is DTensor's own handler of the operator, if any."""
    first: Any = arguments[0]
    meshes = [tensor.device_mesh if isinstance(tensor, DTensor) else None for tensor in first]
    found: list[Any] = [None] * len(first)
    own = handlers.pop(operator)
    if before is not None:
        handlers[operator] = before
    try:
        for mesh in dict.fromkeys(meshes):
            places = [place for place, other in enumerate(meshes) if other == mesh]

            def of_mesh(value: Any, places: list[int] = places) -> Any:
                listed = isinstance(value, list | tuple) and len(value) == len(first)
                return [value[place] for place in places] if listed else value

            made = operator(*map(of_mesh, arguments), **{key: of_mesh(value) for key, value in keywords.items()})
            for place, tensor in zip(places, made or (), strict=False):
                found[place] = tensor
    finally:
        handlers[operator] = own
    return found if any(each is not None for each in found) else None


EXPAND = "expand_to_full_mesh_op_strategy"
MOST = 4096
"""How many expanded strategies are kept for other ranks and other traces."""
_known: dict[Any, Any] = {}


@contextmanager
def strategies_remembered() -> Iterator[None]:
    """Within the context, expand equal strategies once for all meshes of one shape."""
    expand = getattr(utils, EXPAND, None)
    with nullcontext() if expand is None else patch.object(utils, EXPAND, _remembering(expand)):
        yield


def _remembering(expand: Callable[..., Any]) -> Callable[..., Any]:
    def expanded(mesh: Any, schema: Any, single: Any, **settings: Any) -> Any:
        inputs = (*schema.args_strategy, *schema.kwargs_strategy)
        specs = [one.output_spec for each in inputs for one in each.strategies]
        if any(spec.mesh != mesh for spec in specs):
            return expand(mesh, schema, single, **settings)
        counts = tuple(len(each.strategies) for each in inputs)
        form = expand, mesh.device_type, mesh.shape, schema.op, counts, tuple(map(_without_mesh, specs))
        key = *form, tuple(map(tuple, single)), _hashable(settings)
        try:
            if key not in _known:
                if len(_known) >= MOST:
                    _known.clear()
                _known[key] = mesh, expand(mesh, schema, single, **settings)
        except TypeError:  # a symbolic size is unhashable
            return expand(mesh, schema, single, **settings)
        of, found = _known[key]
        return found if of is mesh else _on(mesh, found)

    return expanded


def _without_mesh(spec: Any) -> tuple[Any, ...]:
    return tuple(value for name, value in vars(spec).items() if name not in ("mesh", "_hash"))


def _on(mesh: Any, strategy: OpStrategy) -> OpStrategy:
    """Return `strategy` for another mesh of the same shape, such as the mesh of another process group."""

    def spec(old: Any) -> Any:
        if old is None or isinstance(old, tuple | list):
            return None if old is None else type(old)(map(spec, old))
        new = object.__new__(DTensorSpec)  # skip the checks of `__init__`, which `old` has passed
        vars(new).update(vars(old), mesh=mesh, _hash=None)
        return new

    made = [OpSpec(spec(s.output_specs), spec(s.input_specs), s.redistribute_cost) for s in strategy.strategies]
    return OpStrategy(made)


def _hashable(settings: dict[str, Any]) -> tuple[Any, ...]:
    return tuple((name, tuple(each) if isinstance(each, list) else each) for name, each in sorted(settings.items()))
