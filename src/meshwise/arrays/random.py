"""Random arrays: an element depends on the seed, the number of the draw, and its own place in the array, and on
nothing else: the same numbers on any number of devices, on a CPU as on a GPU.
"""

from __future__ import annotations

import functools
import itertools
import math
import secrets
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from meshwise.arrays.array import Array
from meshwise.arrays.creation import Placement, as_shape, asarray, made
from meshwise.arrays.dtypes import as_dtype, limits
from meshwise.arrays.philox import bits
from meshwise.arrays.sharding import Shape
from meshwise.arrays.space import Space
from meshwise.spec.errors import UsageError
from meshwise.transfer import collectives
from meshwise.workers.verb_log import came_to

Draw = Callable[[Tensor, Tensor], Tensor]
"""(upper, lower) 32 bits of each element -> its values."""


class Generator:
    """Random arrays of one seed: `rng = xp.random.default_rng(7)`. Each call draws anew.

    Over ranks all ranks make the same calls, and each makes its part.
    """

    def __init__(self, space: Space, seed: int | None = None) -> None:
        self._space = space
        self.seed(seed)

    def seed(self, seed: int | None = None) -> None:
        """Begin anew with this seed; with none, with one of the system's, the same on all ranks."""
        if seed is None:
            seed = secrets.randbits(63)
            if self._space.over_ranks:
                came_to("random.seed")
                seed = int(collectives.broadcast_object(seed, collectives.everyone()))
        if not isinstance(seed, int) or not 0 <= seed < 2**64:
            raise UsageError(f"seed {seed!r}: give a whole number from 0 to 2**64 - 1.")
        self.key, self._streams = seed, itertools.count()

    def random(self, size: Any = None, dtype: Any = None, *, device: Any = None, sharding: Placement = None) -> Array:
        """Uniform numbers from 0 to below 1, of the default float or another float type."""
        kind = self._float(dtype)
        return self._drawn(size, kind, (device, sharding), lambda u, v: _uniform(u, v, kind))

    def uniform(
        self,
        low: float = 0.0,
        high: float = 1.0,
        size: Any = None,
        dtype: Any = None,
        *,
        device: Any = None,
        sharding: Placement = None,
    ) -> Array:
        """Uniform numbers from `low` to below `high`."""
        kind = self._float(dtype)
        return self._drawn(size, kind, (device, sharding), lambda u, v: _uniform(u, v, kind).mul_(high - low).add_(low))

    def normal(
        self,
        loc: float = 0.0,
        scale: float = 1.0,
        size: Any = None,
        dtype: Any = None,
        *,
        device: Any = None,
        sharding: Placement = None,
    ) -> Array:
        """Normal numbers of mean `loc` and standard deviation `scale`: the inverse of their distribution, of uniform
        ones in 53 bits."""
        kind = self._float(dtype)

        def draw(upper: Tensor, lower: Tensor) -> Tensor:
            centred = _uniform(upper, lower, torch.float64).add_(2.0**-54)  # never 0
            normal: Tensor = torch.special.ndtri(centred).mul_(scale).add_(loc)
            return normal.to(kind)

        return self._drawn(size, kind, (device, sharding), draw)

    def standard_normal(
        self, size: Any = None, dtype: Any = None, *, device: Any = None, sharding: Placement = None
    ) -> Array:
        """Normal numbers of mean 0 and standard deviation 1."""
        return self.normal(0.0, 1.0, size, dtype, device=device, sharding=sharding)

    def exponential(
        self, scale: float = 1.0, size: Any = None, dtype: Any = None, *, device: Any = None, sharding: Placement = None
    ) -> Array:
        """Exponential numbers of this mean."""
        kind = self._float(dtype)

        def draw(upper: Tensor, lower: Tensor) -> Tensor:
            return torch.log1p(-_uniform(upper, lower, torch.float64)).mul_(-scale).to(kind)

        return self._drawn(size, kind, (device, sharding), draw)

    def integers(
        self,
        low: int,
        high: int | None = None,
        size: Any = None,
        dtype: Any = None,
        *,
        device: Any = None,
        sharding: Placement = None,
    ) -> Array:
        """Whole numbers from `low` to below `high`; with one number, from 0 to below it."""
        begin, end = (0, int(low)) if high is None else (int(low), int(high))
        kind = torch.int64 if dtype is None else as_dtype(dtype)
        least, most = limits(kind)
        if not least <= begin < end <= most + 1 or end - begin >= 2**63:
            raise UsageError(f"integers from {begin} to below {end} of {kind}: there are none such. Give low < high.")
        count = end - begin

        def draw(upper: Tensor, lower: Tensor) -> Tensor:
            if count < 2**31:
                return ((upper * count + (lower * count >> 32)) >> 32).add_(begin).to(kind)
            return ((upper & 0x7FFFFFFF) << 32 | lower).remainder_(count).add_(begin).to(kind)

        return self._drawn(size, kind, (device, sharding), draw)

    def permutation(self, x: Any, *, device: Any = None, sharding: Placement = None) -> Array:
        """The whole numbers below `x` in a random order. One place, over ranks each, finds the order of all."""
        if not isinstance(x, int):
            raise UsageError("permutation of an array: write x[xp.random.permutation(len(x))].")
        stream = next(self._streams)
        at = self._space.devices[self._space.here[0]]
        upper, lower = bits(0, x, stream, self.key, at)
        order = torch.argsort((upper & 0x7FFFFFFF) << 32 | lower, stable=True)
        return asarray(self._space, order, device=device, sharding=sharding, copy=True)

    def _float(self, dtype: Any) -> torch.dtype:
        kind = self._space.default_float if dtype is None else as_dtype(dtype)
        if not kind.is_floating_point:
            raise UsageError(f"random numbers of {kind}: give a float type, or write integers(low, high).")
        return kind

    def _drawn(self, size: Any, dtype: torch.dtype, placement: tuple[Any, Placement], draw: Draw) -> Array:
        shape = () if size is None else as_shape(size)
        stream = next(self._streams)

        def part(own: Shape, where: tuple[slice, ...], at: torch.device) -> Tensor:
            return draw_part(shape, where, at, functools.partial(bits, stream=stream, key=self.key, device=at), draw)

        return made(self._space, shape, dtype, placement, part)


def draw_part(
    shape: Shape,
    where: tuple[slice, ...],
    at: torch.device,
    of: Callable[[int, int], tuple[Tensor, Tensor]],
    draw: Draw,
) -> Tensor:
    """The values of a part: its elements are runs in the order of the whole array's."""
    own = tuple(each.stop - each.start for each in where)
    divided = [dim for dim in range(len(shape)) if own[dim] != shape[dim]]
    after = math.prod(shape[divided[0] :]) if divided else math.prod(shape)
    first = where[divided[0]].start * math.prod(shape[divided[0] + 1 :]) if divided else 0
    length = math.prod(own[divided[0] :]) if divided else after
    runs = math.prod(shape[: divided[0]]) if divided else 1
    if not math.prod(own):
        return draw(*of(0, 0)).reshape(own)
    return torch.cat([draw(*of(run * after + first, length)) for run in range(runs)]).reshape(own)


def _uniform(upper: Tensor, lower: Tensor, dtype: torch.dtype) -> Tensor:
    """From 0 to below 1, in the bits that the type has."""
    if dtype is torch.float64:
        return ((upper << 21) | (lower >> 11)).to(dtype).mul_(2.0**-53)
    kept = {torch.float32: 24, torch.float16: 11}.get(dtype, 8)
    return (upper >> (32 - kept)).to(torch.float32).mul_(2.0**-kept).to(dtype)


class Random(Generator):
    """`xp.random`: NumPy's functions of these names, with a generator of its own, and `default_rng`."""

    def default_rng(self, seed: int | None = None) -> Generator:
        """A generator of this seed."""
        return Generator(self._space, seed)

    def rand(self, *shape: int) -> Array:
        """`random(shape)`."""
        return self.random(shape)

    def randn(self, *shape: int) -> Array:
        """`standard_normal(shape)`."""
        return self.standard_normal(shape)

    def randint(self, low: int, high: int | None = None, size: Any = None, dtype: Any = None) -> Array:
        """`integers(low, high, size)`."""
        return self.integers(low, high, size, dtype)
