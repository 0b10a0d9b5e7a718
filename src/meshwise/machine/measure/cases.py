"""One path at one size, inside a rank: what to call again and again, and how to see that every byte arrived.

The data depend on the round, the rank and the part of the tensor that it is (transfer/pattern.py), so that permuted,
swapped, stale, missing and zeroed parts all differ. Sums are of small whole numbers, exact in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from meshwise.transfer import collectives
from meshwise.transfer.collectives import Group
from meshwise.transfer.pattern import fill, fill_terms, first_difference, first_wrong_sum

_ACK = 8  # bytes of the answer to a copy


@dataclass(frozen=True)
class Case:
    """size: bytes, as they are counted. fill(round) writes this rank's data, call communicates, wrong(round) says in
    words where what has arrived here differs; None when nothing does. counts: whether this rank's seconds do.
    """

    size: int
    fill: Callable[[int], None]
    call: Callable[[], None]
    wrong: Callable[[int], str | None]
    counts: bool = True


@dataclass(frozen=True)
class Place:
    """Where a rank measures: its rank among how many, the group, its device."""

    rank: int
    ranks: int
    group: Group
    device: torch.device


Maker = Callable[[Place, int], Case]
"""Makes the case of a size; each rank makes its own."""


def checked(case: Case, number: int) -> str | None:
    """Communicate once with the data of round `number`; where what has arrived here differs, or None."""
    case.fill(number)
    case.call()
    return case.wrong(number)


def all_reduce(place: Place, size: int) -> Case:
    """Size is of the tensor on each rank."""
    tensor = torch.empty(max(size // 4, 1), device=place.device)

    def wrong(number: int) -> str | None:
        at = first_wrong_sum(tensor, place.ranks, number * place.ranks)
        return None if at is None else f"the sum on rank {place.rank} is wrong from byte {4 * at}"

    return Case(
        tensor.nbytes,
        lambda number: _discard(fill_terms(tensor, number * place.ranks + place.rank)),
        lambda: _discard(collectives.all_reduce(tensor, group=place.group)),
        wrong,
    )


def broadcast(source: int, direct: bool) -> Maker:
    """From rank `source`. Size is of the tensor."""

    def make(place: Place, size: int) -> Case:
        tensor = torch.empty(size, dtype=torch.uint8, device=place.device)
        own = place.rank == source
        return Case(
            size,
            lambda number: _discard(fill(tensor, number) if own else tensor.zero_()),
            lambda: _discard(collectives.broadcast(tensor, source, place.group, direct=direct)),
            lambda number: _difference(tensor, number, f"rank {place.rank} has of rank {source}"),
        )

    return make


def all_gather(direct: bool) -> Maker:
    """Size is of what every rank has in the end."""

    def make(place: Place, size: int) -> Case:
        own, out = _parts(place, size)

        def wrong(number: int) -> str | None:
            return _first(
                _difference(out[rank], _key(place, number, rank, 0), f"rank {place.rank} has of rank {rank}")
                for rank in range(place.ranks)
            )

        return Case(
            out.nbytes,
            lambda number: _discard(fill(own, _key(place, number, place.rank, 0))),
            lambda: _discard(collectives.all_gather(own, place.group, out=out, direct=direct)),
            wrong,
        )

    return make


def reduce_scatter(direct: bool) -> Maker:
    """Size is of the tensor on each rank before it is divided."""

    def make(place: Place, size: int) -> Case:
        count = max(size // 4 // place.ranks, 1)
        tensor = torch.empty(place.ranks, count, device=place.device)
        out = torch.empty(1, count, device=place.device)

        def write(number: int) -> None:
            for part in range(place.ranks):
                fill_terms(tensor[part], _key(place, number, part, place.rank))

        def wrong(number: int) -> str | None:
            at = first_wrong_sum(out, place.ranks, _key(place, number, place.rank, 0))
            return None if at is None else f"the sum on rank {place.rank} is wrong from byte {4 * at} of its part"

        def call() -> None:
            collectives.reduce_scatter(tensor, group=place.group, out=out, direct=direct)

        return Case(tensor.nbytes, write, call, wrong)

    return make


def all_to_all(direct: bool) -> Maker:
    """Size is of the tensor on each rank."""

    def make(place: Place, size: int) -> Case:
        _, tensor = _parts(place, size)
        out = torch.empty_like(tensor)

        def write(number: int) -> None:
            for to in range(place.ranks):
                fill(tensor[to], _key(place, number, place.rank, to))

        def wrong(number: int) -> str | None:
            return _first(
                _difference(out[by], _key(place, number, by, place.rank), f"rank {place.rank} has of rank {by}")
                for by in range(place.ranks)
            )

        def call() -> None:
            collectives.all_to_all(tensor, place.group, out=out, direct=direct)

        return Case(tensor.nbytes, write, call, wrong)

    return make


def send_receive(place: Place, size: int) -> Case:
    """Every rank sends to the next one and receives from the one before, at once. Size is of the tensor."""
    after, before = (place.rank + 1) % place.ranks, (place.rank - 1) % place.ranks
    return _exchanged(place, size, [after], [before], size)


def copy(source: int, target: int) -> Maker:
    """Rank `source` sends to `target`, which answers with a few bytes: one clock sees both. Size is of the tensor."""

    def make(place: Place, size: int) -> Case:
        if place.rank not in (source, target):
            return _idle(size)
        tensor = torch.empty(size, dtype=torch.uint8, device=place.device)
        answer = torch.zeros(_ACK, dtype=torch.uint8, device=place.device)

        def forth() -> None:
            collectives.send(tensor, target, place.group)
            collectives.receive(answer, target, place.group)

        def back() -> None:
            collectives.receive(tensor, source, place.group)
            collectives.send(answer, source, place.group)

        if place.rank == source:
            return Case(size, lambda number: _discard(fill(tensor, number)), forth, lambda number: None)
        return Case(
            size,
            lambda number: _discard(tensor.zero_()),
            back,
            lambda number: _difference(tensor, number, f"rank {target} has of rank {source}"),
            counts=False,
        )

    return make


def both_ways(one: int, other: int) -> Maker:
    """Two ranks send to each other at once. Size is of one direction."""

    def make(place: Place, size: int) -> Case:
        if place.rank not in (one, other):
            return _idle(size)
        peer = other if place.rank == one else one
        return _exchanged(place, size, [peer], [peer], size)

    return make


def one_to_all(source: int, back: bool) -> Maker:
    """Rank `source` sends to all others at once, or (back) receives from all. Size is of what leaves or reaches it."""

    def make(place: Place, size: int) -> Case:
        others = [rank for rank in range(place.ranks) if rank != source]
        part = max(size // len(others), 1)
        far = others if place.rank == source else [source]
        to, by = ([], far) if (place.rank == source) == back else (far, [])
        return _exchanged(place, part, to, by, part * len(others))

    return make


def _exchanged(place: Place, size: int, to: list[int], by: list[int], counted: int) -> Case:
    outgoing = {rank: torch.empty(size, dtype=torch.uint8, device=place.device) for rank in to}
    incoming = {rank: torch.empty(size, dtype=torch.uint8, device=place.device) for rank in by}

    def write(number: int) -> None:
        for rank, tensor in outgoing.items():
            fill(tensor, _key(place, number, place.rank, rank))

    def call() -> None:
        collectives.send_receive(
            [(tensor, rank) for rank, tensor in outgoing.items()],
            [(tensor, rank) for rank, tensor in incoming.items()],
            place.group,
        )

    def wrong(number: int) -> str | None:
        return _first(
            _difference(tensor, _key(place, number, rank, place.rank), f"rank {place.rank} has of rank {rank}")
            for rank, tensor in incoming.items()
        )

    return Case(counted, write, call, wrong)


def _idle(size: int) -> Case:
    """Of a rank that does not take part."""
    return Case(size, lambda number: None, lambda: None, lambda number: None, counts=False)


def _parts(place: Place, size: int) -> tuple[Tensor, Tensor]:
    """A part of `size`, and a tensor of one part a rank."""
    part = max(size // place.ranks, 1)
    whole = torch.empty(place.ranks, part, dtype=torch.uint8, device=place.device)
    return torch.empty(part, dtype=torch.uint8, device=place.device), whole


def _key(place: Place, number: int, one: int, other: int) -> int:
    """A key that no other round and no other pair of rank and part has."""
    return (number * place.ranks + one) * place.ranks + other


def _difference(tensor: Tensor, key: int, what: str) -> str | None:
    at = first_difference(tensor, key)
    return None if at is None else f"what {what} differs from byte {at}"


def _first(found: Iterable[str | None]) -> str | None:
    return next((text for text in found if text is not None), None)


def _discard(value: object) -> None:
    return None
