"""Draw random arrays that are equal on any number of devices.

An element depends only on the seed, on the number of the draw, and on the element's index in the array: a CPU and a GPU
draw the same numbers.
"""

from __future__ import annotations

import itertools
import math
import secrets
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from meshwise.arrays.arguments import missing
from meshwise.arrays.array import Array
from meshwise.arrays.creation import Placement, as_shape, asarray, made
from meshwise.arrays.dtypes import as_dtype, limits
from meshwise.arrays.philox import bits, bits_at
from meshwise.arrays.sharding import Shape
from meshwise.arrays.space import Space
from meshwise.spec.errors import UsageError
from meshwise.transfer import collectives
from meshwise.workers.verb_log import log_verb

Draw = Callable[[Tensor, Tensor], Tensor]
"""A function from the upper and the lower 32 random bits of elements to their values."""


class Generator:
    """A generator of random arrays, such as `rng = xp.random.default_rng(7)`. Each call draws new numbers."""

    def __init__(self, space: Space, seed: int | None = None) -> None:
        self._space = space
        self.seed(seed)

    def seed(self, seed: int | None = None) -> None:
        """Restart the generator with this seed, by default with a random seed."""
        if seed is None:
            seed = secrets.randbits(63)
            if self._space.over_ranks:
                log_verb("random.seed")
                seed = int(collectives.tell_all(seed))
        if not isinstance(seed, int) or not 0 <= seed < 2**64:
            raise UsageError(f"seed must be a whole number from 0 to 2**64 - 1, but it is {seed!r}.")
        self.key, self._streams = seed, itertools.count()

    def random(self, size: Any = None, dtype: Any = None, *, device: Any = None, sharding: Placement = None) -> Array:
        """Draw numbers from the uniform distribution on [0, 1)."""
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
        """Draw numbers from the uniform distribution on [low, high)."""
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
        """Draw numbers from the normal distribution with mean `loc` and standard deviation `scale`."""
        if scale < 0:
            raise ValueError(f"normal: scale must be 0 or more, but it is {scale}.")
        kind = self._float(dtype)

        def draw(upper: Tensor, lower: Tensor) -> Tensor:
            centred = _uniform(upper, lower, torch.float64).add_(2.0**-54)  # never 0, where ndtri is infinite
            normal: Tensor = torch.special.ndtri(centred).mul_(scale).add_(loc)
            return normal.to(kind)

        return self._drawn(size, kind, (device, sharding), draw)

    def standard_normal(
        self, size: Any = None, dtype: Any = None, *, device: Any = None, sharding: Placement = None
    ) -> Array:
        """Draw numbers from the normal distribution with mean 0 and standard deviation 1."""
        return self.normal(0.0, 1.0, size, dtype, device=device, sharding=sharding)

    def exponential(
        self, scale: float = 1.0, size: Any = None, dtype: Any = None, *, device: Any = None, sharding: Placement = None
    ) -> Array:
        """Draw numbers from the exponential distribution with mean `scale`."""
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
        """Draw integers from `low` up to but not including `high`."""
        begin, end = (0, int(low)) if high is None else (int(low), int(high))
        kind = torch.int64 if dtype is None else as_dtype(dtype)
        least, most = limits(kind)
        if not least <= begin < end <= most + 1 or end - begin >= 2**63:
            raise UsageError(f"integers({begin}, {end}): need low < high, both in {kind}, and high - low < 2**63.")
        count = end - begin

        def draw(upper: Tensor, lower: Tensor) -> Tensor:
            if count < 2**31:
                return ((upper * count + (lower * count >> 32)) >> 32).add_(begin).to(kind)
            return _whole(upper, lower).remainder_(count).add_(begin).to(kind)

        return self._drawn(size, kind, (device, sharding), draw)

    def permutation(self, x: Any, *, device: Any = None, sharding: Placement = None) -> Array:
        """Return the integers below `x`, or the entries of the array `x`, in a random order."""
        if not isinstance(x, int):
            entries = asarray(self._space, x, device=device, sharding=sharding)
            found: Array = entries[self.permutation(len(entries))]
            return found
        at = self._space.devices[self._space.here[0]]
        keys = draw_part((x,), (slice(0, x),), at, (next(self._streams), self.key), _whole)
        order = torch.argsort(keys, stable=True)
        return asarray(self._space, order, device=device, sharding=sharding, copy=True)

    def shuffle(self, x: Array) -> None:
        """Shuffle the entries of `x` in place."""
        x[...] = self.permutation(x)

    def choice(
        self,
        a: Any,
        size: Any = None,
        replace: bool = True,
        p: Any = None,
        *,
        device: Any = None,
        sharding: Placement = None,
    ) -> Array:
        """Draw entries of the array `a`, or integers below the number `a`."""
        count = a if isinstance(a, int) else len(a)
        shape = () if size is None else as_shape(size)
        placement: dict[str, Any] = {"device": device, "sharding": sharding}
        if p is not None:
            if not replace:
                raise UsageError("choice(p=..., replace=False) is not supported. Leave out replace=False, or p.")
            upto = np.cumsum(np.asarray(p, np.float64))
            if upto.shape != (count,) or (np.diff(upto, prepend=0) < 0).any() or abs(upto[-1] - 1) > 1e-7:
                raise ValueError(f"choice: p must contain {count} numbers of at least 0 that add up to 1.")
            where = self.random(shape, torch.float64, **placement)
            index = where.__array_namespace__().searchsorted(asarray(self._space, upto / upto[-1]), where, side="right")
        elif replace:
            index = self.integers(0, count, shape, **placement)
        else:
            drawn = math.prod(shape)
            if drawn > count:
                raise ValueError(f"choice cannot draw {drawn} out of {count} without replacement. Pass replace=True.")
            index = asarray(self._space, self.permutation(count)[:drawn].reshape(shape), **placement)
        return index if isinstance(a, int) else asarray(self._space, a)[index]

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(missing("random", name, (each for each in dir(type(self)) if each[0] != "_")))

    def _float(self, dtype: Any) -> torch.dtype:
        kind = self._space.default_float if dtype is None else as_dtype(dtype)
        if not kind.is_floating_point:
            raise UsageError(f"this distribution needs a float dtype, not {kind}. For integers use integers(a, b).")
        return kind

    def _drawn(self, size: Any, dtype: torch.dtype, placement: tuple[Any, Placement], draw: Draw) -> Array:
        shape = () if size is None else as_shape(size)
        source = next(self._streams), self.key

        def part(own: Shape, where: tuple[slice, ...], at: torch.device) -> Tensor:
            return draw_part(shape, where, at, source, draw)

        return made(self._space, shape, dtype, placement, part)


BLOCKS = {"cpu": 1 << 15}
"""How many numbers to draw at a time on a CPU, so that their random bits stay in its cache. Other devices draw 2**23
numbers at a time, whose random bits take little memory on a GPU."""


def draw_part(shape: Shape, where: tuple[slice, ...], at: torch.device, source: tuple[int, int], draw: Draw) -> Tensor:
    """Return the random values of one part of an array."""
    own = tuple(each.stop - each.start for each in where)
    divided = next((dim for dim in range(len(shape)) if own[dim] != shape[dim]), 0)
    size, after = math.prod(own), math.prod(shape[divided:])
    first = where[divided].start * math.prod(shape[divided + 1 :]) if shape else 0
    length, block = math.prod(own[divided:]), BLOCKS.get(at.type, 1 << 23)
    made_of: Tensor | None = None
    for begin in range(0, max(size, 1), block):
        count = min(block, size - begin)
        if length == size:
            words = bits(first + begin, count, *source, at)
        else:
            number = torch.arange(begin, begin + count, dtype=torch.int64, device=at)
            words = bits_at(number // length * after + first + number % length, *source)
        values = draw(*words)
        if count == size:
            return values.reshape(own)
        if made_of is None:
            made_of = torch.empty(size, dtype=values.dtype, device=at)
        made_of[begin : begin + count] = values
    assert made_of is not None
    return made_of.view(own)


def _whole(upper: Tensor, lower: Tensor) -> Tensor:
    """Join the upper and the lower 32 random bits to a non-negative int64 number. The highest bit is left out."""
    return (upper & 0x7FFFFFFF) << 32 | lower


def _uniform(upper: Tensor, lower: Tensor, dtype: torch.dtype) -> Tensor:
    """Return uniform numbers in [0, 1)."""
    if dtype is torch.float64:
        return ((upper << 21) | (lower >> 11)).to(dtype).mul_(2.0**-53)
    kept = {torch.float32: 24, torch.float16: 11}.get(dtype, 8)
    return (upper >> (32 - kept)).to(torch.float32).mul_(2.0**-kept).to(dtype)


class Random(Generator):
    """The object `xp.random`. It has `default_rng`, and NumPy's random functions, which share one generator."""

    def default_rng(self, seed: int | None = None) -> Generator:
        """Make a generator with this seed, by default with a random seed."""
        return Generator(self._space, seed)

    def rand(self, *shape: int) -> Array:
        """Return `random(shape)`."""
        return self.random(shape)

    def randn(self, *shape: int) -> Array:
        """Return `standard_normal(shape)`."""
        return self.standard_normal(shape)

    def randint(self, low: int, high: int | None = None, size: Any = None, dtype: Any = None) -> Array:
        """Return `integers(low, high, size, dtype)`."""
        return self.integers(low, high, size, dtype)
