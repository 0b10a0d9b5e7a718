"""The namespace that bench/array_api.py tests: every array of one or more dims is split as the test's seed draws it.

Settings come from the environment: PLACES, how many virtual devices; GUARD=error forbids hidden gathers.
"""

from __future__ import annotations

import os
from random import Random
from typing import Any

from hypothesis import strategies
from hypothesis.control import _current_build_context

import meshwise as mw
from meshwise.arrays.sharding import Layout, Sharding, sharding
from meshwise.arrays.space import ALL, Space

PLACES = int(os.environ.get("PLACES", "2"))
SEEDS = strategies.integers(0, 2**16 - 1)
_outside = Random(0)


_plainly = Space.placed


def drawn(
    space: Space, shape: tuple[int, ...], device: Any = None, wanted: Layout | Sharding | None = None
) -> Sharding:
    """In place of `Space.placed`: where nothing is asked for, a dim and sizes by the seed of the test; some are 0."""
    if not shape or wanted is not None or device not in (None, ALL):
        return _plainly(space, shape, device, wanted)
    context = _current_build_context.value
    seed = context.data.draw(SEEDS) if context is not None and not context.data.frozen else _outside.randrange(2**16)
    generator = Random(seed)
    dim = generator.randrange(len(shape))
    cuts = sorted(generator.randint(0, shape[dim]) for _ in range(PLACES - 1))
    sizes = tuple(end - start for start, end in zip([0, *cuts], [*cuts, shape[dim]], strict=True))
    return sharding(space.places, dim, sizes)


Space.placed = drawn  # type: ignore[method-assign]
xp: Any = mw.array_namespace(f"{PLACES}xcpu")
if os.environ.get("GUARD") == "error":
    guard = mw.guard("error")  # kept: it ends with the object
    guard.__enter__()
globals().update({name: getattr(xp, name) for name in dir(xp) if not name.startswith("__") or "array_api" in name})
__array_namespace_info__ = xp.__array_namespace_info__
