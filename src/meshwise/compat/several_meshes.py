"""Run operators on lists of DTensors that lie on several meshes.

Such operators are `_foreach_`, fused optimizers and a loss scaler's check. DTensor accepts tensors of one mesh only, so
it is called once for each mesh.

The hook is private. Read in torch 2.13: `distributed/tensor/_dispatch.py`.

Tested in tests/parallel/test_experts.py.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.distributed.tensor import DTensor

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
    """Call the operator once for each device mesh among its tensors. before: DTensor's own handler for the operator, if
    any."""
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
