"""Let DTensor expand equal sharding strategies once.

An operator on a list of DTensors, such as a step of Adam, expands the strategies of each tensor on its own, which takes
milliseconds a tensor. The parameters of alike blocks have the same ones, also on the meshes of other ranks.

The function is private. Read in torch 2.13: `distributed/tensor/_ops/utils.py`, `_dtensor_spec.py`, `_op_schema.py`.
Another version is left as it is.

Tested in tests/compat/test_strategies.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor._op_schema import OpSpec, OpStrategy
from torch.distributed.tensor._ops import utils

EXPAND = "expand_to_full_mesh_op_strategy"
MOST = 4096
"""How many expanded strategies are kept for other ranks and other traces."""
_known: dict[Any, Any] = {}


@contextmanager
def strategies_remembered() -> Iterator[None]:
    """Within the context, expand equal strategies once for all meshes of one shape."""
    expand = getattr(utils, EXPAND, None)
    if expand is None:
        yield
        return
    setattr(utils, EXPAND, _remembering(expand))
    try:
        yield
    finally:
        setattr(utils, EXPAND, expand)


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
        except TypeError:  # a size without a value has no hash
            return expand(mesh, schema, single, **settings)
        of, found = _known[key]
        return found if of is mesh else _on(mesh, found)

    return expanded


def _without_mesh(spec: Any) -> tuple[Any, ...]:
    return tuple(value for name, value in vars(spec).items() if name not in ("mesh", "_hash"))


def _on(mesh: Any, strategy: OpStrategy) -> OpStrategy:
    """Return a strategy on another mesh of the same shape: that of another rank, or of another process group."""

    def spec(old: Any) -> Any:
        if isinstance(old, tuple | list):
            return type(old)(map(spec, old))
        if old is None:
            return None
        new = object.__new__(DTensorSpec)  # without the checks that the old one has passed
        vars(new).update(vars(old), mesh=mesh, _hash=None)
        return new

    return OpStrategy(
        [OpSpec(spec(one.output_specs), spec(one.input_specs), one.redistribute_cost) for one in strategy.strategies]
    )


def _hashable(settings: dict[str, Any]) -> tuple[Any, ...]:
    return tuple((name, tuple(each) if isinstance(each, list) else each) for name, each in sorted(settings.items()))
