"""Describe where an array lies: whole, or split along a dim.

A user writes a `Layout` before the shape is known; `Layout.of` makes the `Sharding` of an array from it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from meshwise.spec.errors import UsageError

Shape = tuple[int, ...]
Slices = tuple[slice, ...]


def resized(shape: Shape, dim: int, length: int) -> Shape:
    """Return a shape with another length along `dim`."""
    return (*shape[:dim], length, *shape[dim + 1 :])


@dataclass(frozen=True)
class Sharding:
    """How an array lies on devices. A place is the number of a device in the list of devices of the array's
    namespace."""

    places: tuple[int, ...]
    dim: int | None = None
    sizes: tuple[int, ...] = ()

    def __hash__(self) -> int:
        return self._hash

    @functools.cached_property
    def _hash(self) -> int:
        return hash((self.places, self.dim, self.sizes))

    @functools.cached_property
    def numbered(self) -> tuple[tuple[int, int], ...]:
        """Pairs (number of a part, number of the device on which the part lies), in order."""
        return tuple(enumerate(self.places))

    @functools.cached_property
    def offsets(self) -> tuple[int, ...]:
        """The index of the first entry of each part along `dim`."""
        return tuple(sum(self.sizes[:part]) for part in range(len(self.sizes)))

    @property
    def divided(self) -> bool:
        return self.dim is not None

    @property
    def single(self) -> bool:
        """Whether the whole array lies on one device."""
        return len(self.places) == 1

    def part_shape(self, shape: Shape, part: int) -> Shape:
        """Return the shape of part number `part` for an array of shape `shape`."""
        if self.dim is None:
            return shape
        return resized(shape, self.dim, self.sizes[part])

    def interval(self, shape: Shape, part: int) -> Slices:
        """Return the slices that select part number `part` from the whole array, one slice per dim."""
        whole = [slice(0, length) for length in shape]
        if self.dim is not None:
            begin = self.offsets[part]
            whole[self.dim] = slice(begin, begin + self.sizes[part])
        return tuple(whole)

    def spans(self, dim: int, length: int) -> list[tuple[int, int]]:
        """Return (first entry, number of entries) of each part along any dim, which has this length in the array."""
        if dim != self.dim:
            return [(0, length)] * len(self.places)
        return list(zip(self.offsets, self.sizes, strict=True))

    def along(self, dim: int | None) -> Sharding:
        """Return a sharding with the same places and sizes along another dim."""
        return self if dim == self.dim else sharding(self.places, dim, self.sizes)

    def shifted(self, by: int) -> Sharding:
        """Return the sharding of an array with `by` more dims in front, or fewer if `by` is negative."""
        return self if self.dim is None else self.along(self.dim + by)


@functools.lru_cache(maxsize=4096)
def sharding(places: tuple[int, ...], dim: int | None = None, sizes: tuple[int, ...] = ()) -> Sharding:
    """Return the `Sharding` with these values."""
    return Sharding(places, dim, sizes)


@functools.lru_cache(maxsize=4096)
def evenly(length: int, places: tuple[int, ...], dim: int = 0) -> Sharding:
    """Divide `length` entries of `dim` over `places` as torch.tensor_split does."""
    each, more = divmod(length, len(places))
    return sharding(places, dim, tuple(each + (part < more) for part in range(len(places))))


@functools.lru_cache(maxsize=4096)
def by_weights(length: int, weights: tuple[float, ...]) -> tuple[int, ...]:
    """Return sizes that add up to `length` and are in proportion to the weights."""
    total = math.fsum(weights)
    shares = [length * weight / total for weight in weights]
    sizes = [int(share) for share in shares]
    order = sorted(range(len(weights)), key=lambda k: (sizes[k] - shares[k], k))
    for k in order[: length - sum(sizes)]:
        sizes[k] += 1
    return tuple(sizes)


@dataclass(frozen=True)
class Layout:
    """A layout that a user asks for before the shape is known. Made by `xp.shard`, `xp.replicated` and `xp.single`."""

    places: tuple[int, ...]
    dim: int | None = None
    sizes: tuple[int, ...] | None = None
    weights: tuple[float, ...] | None = None

    def of(self, shape: Shape) -> Sharding:
        """Return the sharding of an array of this shape. Raises UsageError if the layout does not fit the shape."""
        if self.dim is None:
            return sharding(self.places)
        if not -len(shape) <= self.dim < len(shape):
            raise UsageError(
                f"shard({self.dim}): shape {shape} has no dim {self.dim}. Write xp.single() or xp.replicated()."
            )
        dim = self.dim % len(shape)
        sizes = self.sizes
        if sizes is None and self.weights is not None:
            sizes = by_weights(shape[dim], self.weights)
        if sizes is None:
            return evenly(shape[dim], self.places, dim)
        return fitting(sharding(self.places, dim, sizes), shape)


def fitting(wanted: Sharding, shape: Shape) -> Sharding:
    """Return `wanted`. Raises UsageError if this sharding does not fit the shape."""
    dim, sizes = wanted.dim, wanted.sizes
    if dim is None:
        return sharding(wanted.places)
    if not 0 <= dim < len(shape):
        raise UsageError(f"sharding along dim {dim} of shape {shape}: dim must be at least 0 and below {len(shape)}.")
    if len(sizes) != len(wanted.places) or sum(sizes) != shape[dim] or min(sizes) < 0:
        raise UsageError(
            f"sizes {list(sizes)} of dim {dim} of shape {shape}: {len(wanted.places)} devices need one size each, none "
            f"below 0, and the sizes must add up to {shape[dim]}."
        )
    return sharding(wanted.places, dim, sizes)


def as_layout(
    places: tuple[int, ...], dim: int, sizes: Sequence[int] | None, weights: Sequence[float] | None
) -> Layout:
    """Make the layout in which a dim is divided over devices."""
    if sizes is not None and weights is not None:
        raise UsageError("shard: sizes and weights both set the lengths of the parts. Give only one of the two.")
    for what, given in (("sizes", sizes), ("weights", weights)):
        if given is not None and (len(given) != len(places) or any(not value >= 0 for value in given)):
            raise UsageError(
                f"shard({what}={list(given)}): give one number, 0 or more, for each of the {len(places)} devices."
            )
    if weights is not None and not 0 < math.fsum(weights) < math.inf:
        raise UsageError(f"shard(weights={list(weights)}): weights need a positive, finite sum. Pass device speeds.")
    return Layout(
        places,
        dim,
        None if sizes is None else tuple(int(size) for size in sizes),
        None if weights is None else tuple(float(weight) for weight in weights),
    )


def overlaps(shape: Shape, held: Sharding, wanted: Sharding) -> Iterator[tuple[int, int, Slices, Slices]]:
    """Yield (source part, target part, slices of source, slices of target) of each block to copy for a new sharding."""
    for target, place in enumerate(wanted.places):
        wants = wanted.interval(shape, target)
        if held.dim is None:
            own = held.places.index(place) if place in held.places else target % len(held.places)
            sources: Sequence[int] = (own,)
        else:
            sources = range(len(held.places))
        for source in sources:
            has = held.interval(shape, source)
            both = [(max(a.start, b.start), min(a.stop, b.stop)) for a, b in zip(has, wants, strict=True)]
            if all(begin < end for begin, end in both):
                yield source, target, _within(both, has), _within(both, wants)


def _within(both: Sequence[tuple[int, int]], part: Slices) -> Slices:
    return tuple(slice(a - own.start, b - own.start) for (a, b), own in zip(both, part, strict=True))
