"""Let DTensor expand equal sharding strategies once.

An operator on a list of DTensors, such as a step of Adam, expands the strategies of each tensor on its own, which takes
milliseconds a tensor. The parameters of alike blocks have the same ones.

The function is private. Read in torch 2.13: `distributed/tensor/_ops/utils.py`. Another version is left as it is.

Tested in tests/compat/test_strategies.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.distributed.tensor._ops import utils

EXPAND = "expand_to_full_mesh_op_strategy"


@contextmanager
def strategies_remembered() -> Iterator[None]:
    """Within the context, expand equal strategies once."""
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
    known: dict[Any, Any] = {}

    def expanded(mesh: Any, schema: Any, single: Any, **settings: Any) -> Any:
        inputs = (*schema.args_strategy, *schema.kwargs_strategy)
        specs = tuple(tuple(one.output_spec for one in each.strategies) for each in inputs)
        key = mesh, schema.op, tuple(map(tuple, single)), specs, _hashable(settings)
        try:
            if key not in known:
                known[key] = expand(mesh, schema, single, **settings)
        except TypeError:  # a size without a value has no hash
            return expand(mesh, schema, single, **settings)
        return known[key]

    return expanded


def _hashable(settings: dict[str, Any]) -> tuple[Any, ...]:
    return tuple((name, tuple(each) if isinstance(each, list) else each) for name, each in sorted(settings.items()))
