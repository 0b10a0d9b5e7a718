"""Collectives that move nothing and count: what one rank of a large world would communicate, in one process.

    with null_collectives(world_size=8, rank=3) as counts:
        step()
    print(counts)

Reductions and broadcasts leave the tensor as it is, gathers repeat this rank's own: shapes are right, values are not.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from meshwise.spec.errors import UsageError


@dataclass(frozen=True)
class Counted:
    """One collective that was not carried out: its kind, its bytes (of the full tensor), the ranks that take part."""

    kind: str
    bytes: int
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class NullGroup:
    """A group of ranks of a world that does not exist."""

    ranks: tuple[int, ...]


@dataclass(frozen=True)
class NullWorld:
    """The world that is played, what this rank is in it, and what was counted."""

    ranks: tuple[int, ...]
    rank: int
    counts: list[Counted]


_open: list[NullWorld] = []


@contextmanager
def null_collectives(world_size: int, rank: int = 0) -> Iterator[list[Counted]]:
    """Within the block every collective of meshwise moves nothing and is counted; `world_size()` is this one.

    Raises UsageError where there is no such rank. Collectives that PyTorch makes itself are not covered.
    """
    if world_size < 1 or not 0 <= rank < world_size:
        raise UsageError(
            f"null_collectives(world_size={world_size}, rank={rank}): there is no such rank. "
            f"Write a world_size of at least 1, and a rank from 0 to {max(world_size - 1, 0)}."
        )
    world = NullWorld(tuple(range(world_size)), rank, [])
    _open.append(world)
    try:
        yield world.counts
    finally:
        _open.remove(world)


def null_world() -> NullWorld | None:
    """The world that is played now, the innermost one; None outside any block."""
    return _open[-1] if _open else None


def null_group(ranks: Sequence[int]) -> NullGroup:
    """A group of the world that is played."""
    return NullGroup(tuple(ranks))
