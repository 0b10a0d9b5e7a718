"""Define what one path at one size runs, and verifies.

A case runs inside a rank: what to call repeatedly, and how to see that every byte arrived.

The data depend on the round, the rank and the part of the tensor that it is (transfer/pattern.py), so that permuted,
swapped, stale, missing and zeroed parts all differ. Sums are of small whole numbers, exact in float32.

Tested in tests/machine/test_processes.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from meshwise.compat.collectives import Group
from meshwise.transfer import collectives
from meshwise.transfer.pattern import fill, fill_terms, first_difference, first_wrong_sum

_ACK = 8  # bytes of the answer to a copy


@dataclass(frozen=True)
class Case:
    """A path at one size, for this rank. size: the bytes that count. fill(round): writes this rank's data. call():
    communicates. wrong(round): says where received data differs, or None. counts: whether this rank's time counts."""

    size: int
    fill: Callable[[int], object]
    call: Callable[[], object]
    wrong: Callable[[int], str | None]
    counts: bool = True


@dataclass(frozen=True)
class Member:
    """A rank that measures: its number, how many ranks there are, their group, its device."""

    rank: int
    ranks: int
    group: Group
    device: torch.device

    def bytes(self, *shape: int) -> Tensor:
        return torch.empty(*shape, dtype=torch.uint8, device=self.device)

    def key(self, number: int, one: int, other: int) -> int:
        """Return a key for the data of a round and a pair of ranks (or a rank and a part). No other data has it."""
        return (number * self.ranks + one) * self.ranks + other


Maker = Callable[[Member, int], Case]
"""Makes the case of this rank for a size."""
Parts = Mapping[tuple[int, int], Tensor]
"""Tensors by (source rank, target rank), or by (source rank, number of the part)."""


def checked(case: Case, number: int) -> str | None:
    """Communicate once with the data of round `number`. Return where this rank's received data differs, or None."""
    case.fill(number)
    case.call()
    return case.wrong(number)


def all_reduce(member: Member, size: int) -> Case:
    """Make the case of an all-reduce. size: of the tensor on each rank."""
    tensor = torch.empty(max(size // 4, 1), device=member.device)
    return Case(
        tensor.nbytes,
        lambda number: fill_terms(tensor, number * member.ranks + member.rank),
        lambda: collectives.all_reduce(tensor, group=member.group),
        lambda number: _wrong_sum(member, tensor, number * member.ranks, ""),
    )


def broadcast(source: int, direct: bool) -> Maker:
    """Make cases of a broadcast from rank `source`. Their size is that of the tensor."""

    def make(member: Member, size: int) -> Case:
        tensor = member.bytes(size)
        whole = {(source, 0): tensor}

        def call() -> object:
            return collectives.broadcast(tensor, source, member.group, direct=direct)

        return _of_parts(member, size, whole if member.rank == source else {}, whole, call)

    return make


def all_gather(direct: bool) -> Maker:
    """Make cases of an all-gather. Their size is that of the gathered result."""

    def make(member: Member, size: int) -> Case:
        part = max(size // member.ranks, 1)
        own, out = member.bytes(part), member.bytes(member.ranks, part)

        def call() -> object:
            return collectives.all_gather(own, member.group, out=out, direct=direct)

        incoming = {(rank, 0): out[rank] for rank in range(member.ranks)}
        return _of_parts(member, out.nbytes, {(member.rank, 0): own}, incoming, call)

    return make


def reduce_scatter(direct: bool) -> Maker:
    """Make cases of a reduce-scatter. Their size is that of the whole tensor on each rank."""

    def make(member: Member, size: int) -> Case:
        count = max(size // 4 // member.ranks, 1)
        tensor = torch.empty(member.ranks, count, device=member.device)
        out = torch.empty(1, count, device=member.device)

        def write(number: int) -> None:
            for part in range(member.ranks):
                fill_terms(tensor[part], member.key(number, part, member.rank))

        return Case(
            tensor.nbytes,
            write,
            lambda: collectives.reduce_scatter(tensor, group=member.group, out=out, direct=direct),
            lambda number: _wrong_sum(member, out, member.key(number, member.rank, 0), " of its part"),
        )

    return make


def all_to_all(direct: bool) -> Maker:
    """Make cases of an all-to-all. Their size is that of the tensor on each rank."""

    def make(member: Member, size: int) -> Case:
        tensor, out = (member.bytes(member.ranks, max(size // member.ranks, 1)) for _ in range(2))

        def call() -> object:
            return collectives.all_to_all(tensor, member.group, out=out, direct=direct)

        outgoing = {(member.rank, to): tensor[to] for to in range(member.ranks)}
        incoming = {(by, member.rank): out[by] for by in range(member.ranks)}
        return _of_parts(member, tensor.nbytes, outgoing, incoming, call)

    return make


def send_receive(member: Member, size: int) -> Case:
    """Make the case in which every rank sends to the next one, all at once. size: of the tensor."""
    after, before = (member.rank + 1) % member.ranks, (member.rank - 1) % member.ranks
    return _exchanged(member, size, [after], [before], size)


def copy(source: int, target: int) -> Maker:
    """Make cases of a copy between two ranks. A short answer lets the source's clock time it. Size: of the tensor."""

    def make(member: Member, size: int) -> Case:
        if member.rank not in (source, target):
            return _idle(size)
        tensor, answer = member.bytes(size), member.bytes(_ACK)
        whole = {(source, target): tensor}

        def forth() -> None:
            collectives.send(tensor, target, member.group)
            collectives.receive(answer, target, member.group)

        def back() -> None:
            collectives.receive(tensor, source, member.group)
            collectives.send(answer, source, member.group)

        if member.rank == source:
            return _of_parts(member, size, whole, {}, forth)
        return _of_parts(member, size, {}, whole, back, counts=False)

    return make


def both_ways(one: int, other: int) -> Maker:
    """Make cases in which two ranks send to each other at once. Their size is that of one direction."""

    def make(member: Member, size: int) -> Case:
        if member.rank not in (one, other):
            return _idle(size)
        peer = other if member.rank == one else one
        return _exchanged(member, size, [peer], [peer], size)

    return make


def one_to_all(source: int, back: bool) -> Maker:
    """Make cases of rank `source` sending to all others at once, or, if `back`, receiving. Size: of all together."""

    def make(member: Member, size: int) -> Case:
        others = [rank for rank in range(member.ranks) if rank != source]
        part = max(size // len(others), 1)
        far = others if member.rank == source else [source]
        to, by = ([], far) if (member.rank == source) == back else (far, [])
        return _exchanged(member, part, to, by, part * len(others))

    return make


def _exchanged(member: Member, size: int, to: list[int], by: list[int], counted: int) -> Case:
    """Make a case that sends `size` bytes to each rank of `to` and receives as many from each of `by`, all at once."""
    outgoing = {(member.rank, rank): member.bytes(size) for rank in to}
    incoming = {(rank, member.rank): member.bytes(size) for rank in by}

    def call() -> None:
        collectives.send_receive(
            [(tensor, rank) for (_, rank), tensor in outgoing.items()],
            [(tensor, rank) for (rank, _), tensor in incoming.items()],
            member.group,
        )

    return _of_parts(member, counted, outgoing, incoming, call)


def _of_parts(
    member: Member, size: int, outgoing: Parts, incoming: Parts, call: Callable[[], object], counts: bool = True
) -> Case:
    """Make a case that fills the outgoing tensors, calls `call`, and compares the incoming tensors one by one."""

    def write(number: int) -> None:
        for tensor in incoming.values():
            tensor.zero_()  # what an earlier path left in this memory must not pass for what this one brings
        for pair, tensor in outgoing.items():
            fill(tensor, member.key(number, *pair))

    def wrong(number: int) -> str | None:
        for pair, tensor in incoming.items():
            at = first_difference(tensor, member.key(number, *pair))
            if at is not None:
                return f"what rank {member.rank} has of rank {pair[0]} differs from byte {at}"
        return None

    return Case(size, write, call, wrong, counts)


def _idle(size: int) -> Case:
    """Make the case of a rank that takes no part: it does nothing."""
    return Case(size, lambda number: None, lambda: None, lambda number: None, counts=False)


def _wrong_sum(member: Member, tensor: Tensor, key: int, what: str) -> str | None:
    at = first_wrong_sum(tensor, member.ranks, key)
    return None if at is None else f"the sum on rank {member.rank} is wrong from byte {4 * at}{what}"
