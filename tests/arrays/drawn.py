"""Arrays drawn by seed: shapes with empty and single dims, laid out along any dim in uneven or empty parts."""

from __future__ import annotations

import itertools
import random
from typing import Any

import numpy as np

import meshwise as mw
from meshwise.arrays.sharding import Sharding

LENGTHS = (0, 1, 2, 3, 5, 7)


class Draw:
    """Choices that depend on the seed alone. xp: a namespace of so many places, or of one to three."""

    def __init__(self, seed: object, places: int | None = None) -> None:
        self.rng = random.Random(str(seed))
        self.numbers = np.random.default_rng(self.rng.randrange(2**32))
        self.xp = mw.array_namespace(f"{places or self.rng.choice([1, 2, 3])}xcpu")

    def shape(self, least: int = 1, most: int = 4) -> tuple[int, ...]:
        return tuple(self.rng.choice(LENGTHS) for _ in range(self.rng.randint(least, most)))

    def values(self, shape: Any, below: int = 9, dtype: Any = np.float64) -> Any:
        return self.numbers.integers(0, below, shape).astype(dtype)

    def sharding(self, shape: tuple[int, ...]) -> Any:
        """A dim in parts of any size over the places, in their order or the reverse one; or all on one, or on each."""
        places = len(self.xp.devices)
        if not shape or self.rng.random() < 0.2:
            return self.xp.replicated() if self.rng.random() < 0.5 else self.xp.single(self.rng.randrange(places))
        dim = self.rng.randrange(len(shape))
        cuts = [0, *sorted(self.rng.randint(0, shape[dim]) for _ in range(places - 1)), shape[dim]]
        order = list(range(places))
        if self.rng.random() < 0.2:
            order.reverse()
        return Sharding(tuple(order), dim, tuple(b - a for a, b in itertools.pairwise(cuts)))

    def placed(self, values: Any) -> Any:
        return self.xp.asarray(values, sharding=self.sharding(values.shape))


def same(found: Any, expected: Any) -> None:
    """The array has NumPy's shape, dtype and values, and each part the shape that its sharding says."""
    assert found.shape == expected.shape
    for (number, _), part in zip(found.space.local(found.sharding), found.parts, strict=True):
        assert tuple(part.shape) == found.sharding.part_shape(found.shape, number)
        assert part.dtype is found.dtype
    values = found.numpy()
    assert values.dtype == expected.dtype
    assert np.array_equal(values, expected), (found.sharding, values, expected)
