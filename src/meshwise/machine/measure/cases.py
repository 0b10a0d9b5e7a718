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
    """What one rank runs to measure a path or a collective at one message size.

    size: the number of bytes for the rate, which is `size` / measured time.
    fill: `fill(round)` writes the data that this rank sends in a round. The data differ between rounds.
    call: sends and receives the data once.
    wrong: `wrong(round)` checks the data that this rank received. It returns a text that says where the data is wrong,
        or None.
    counts: whether the time of this rank counts. The measured time is the longest time among the ranks that count.
    """

    size: int
    fill: Callable[[int], object]
    call: Callable[[], object]
    wrong: Callable[[int], str | None]
    counts: bool = True


@dataclass(frozen=True)
class Member:
    """A rank that takes part in a measurement: its number, the number of ranks, their process group, and the rank's
    device."""

    rank: int
    ranks: int
    group: Group
    device: torch.device

    def bytes(self, *shape: int) -> Tensor:
        return torch.empty(*shape, dtype=torch.uint8, device=self.device)

    def key(self, number: int, one: int, other: int) -> int:
        """Return a number from which the test data of one transfer are generated. It is different for each transfer in
        a round, and for each round. So if data arrive in the wrong place, or are left over from an earlier round, the
        check finds it.

        number: the number of the round.
        one, other: two numbers that identify the transfer in the round, such as its source rank and target rank.
        """
        return (number * self.ranks + one) * self.ranks + other


Maker = Callable[[Member, int], Case]
"""A function that makes the `Case` that a rank, given as a `Member`, runs for a message size in bytes."""
Parts = Mapping[tuple[int, int], Tensor]
"""Tensors by (source rank, target rank). If a source sends the same data to all ranks, the target is always 0."""


def checked(case: Case, number: int) -> str | None:
    """Communicate once, and check the data that this rank has received. Returns a text that says where the data is
    wrong, or None.

    number: the number of the round. Each round sends different data, so that data left over from an earlier round is
        noticed.
    """
    case.fill(number)
    case.call()
    return case.wrong(number)


def all_reduce(member: Member, size: int) -> Case:
    """Return the `Case` with which a rank measures an all-reduce.

    size: the bytes of the tensor on each rank.
    """
    tensor = torch.empty(max(size // 4, 1), device=member.device)
    return Case(
        tensor.nbytes,
        lambda number: fill_terms(tensor, number * member.ranks + member.rank),
        lambda: collectives.all_reduce(tensor, group=member.group),
        lambda number: _wrong_sum(member, tensor, number * member.ranks, ""),
    )


def broadcast(source: int, direct: bool) -> Maker:
    """Return a function that makes the `Case` for measuring a broadcast with a given message size. The message size is
    the number of bytes of the tensor.

    source: the rank that sends.
    direct: True to compose the collective of sends and receives, False to call the backend's own collective.
    """

    def make(member: Member, size: int) -> Case:
        tensor = member.bytes(size)
        whole = {(source, 0): tensor}

        def call() -> object:
            return collectives.broadcast(tensor, source, member.group, direct=direct)

        return _of_parts(member, size, whole if member.rank == source else {}, whole, call)

    return make


def all_gather(direct: bool) -> Maker:
    """Return a function that makes the `Case` for measuring an all-gather with a given message size. The message size
    is the number of bytes of the gathered result.

    direct: True to compose the collective of sends and receives, False to call the backend's own collective.
    """

    def make(member: Member, size: int) -> Case:
        part = max(size // member.ranks, 1)
        own, out = member.bytes(part), member.bytes(member.ranks, part)

        def call() -> object:
            return collectives.all_gather(own, member.group, out=out, direct=direct)

        incoming = {(rank, 0): out[rank] for rank in range(member.ranks)}
        return _of_parts(member, out.nbytes, {(member.rank, 0): own}, incoming, call)

    return make


def reduce_scatter(direct: bool) -> Maker:
    """Return a function that makes the `Case` for measuring a reduce-scatter with a given message size. The message
    size is the number of bytes of the whole tensor on each rank.

    direct: True to compose the collective of sends and receives, False to call the backend's own collective.
    """

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
    """Return a function that makes the `Case` for measuring an all-to-all with a given message size. The message size
    is the number of bytes of the tensor on each rank.

    direct: True to compose the collective of sends and receives, False to call the backend's own collective.
    """

    def make(member: Member, size: int) -> Case:
        tensor, out = (member.bytes(member.ranks, max(size // member.ranks, 1)) for _ in range(2))

        def call() -> object:
            return collectives.all_to_all(tensor, member.group, out=out, direct=direct)

        outgoing = {(member.rank, to): tensor[to] for to in range(member.ranks)}
        incoming = {(by, member.rank): out[by] for by in range(member.ranks)}
        return _of_parts(member, tensor.nbytes, outgoing, incoming, call)

    return make


def send_receive(member: Member, size: int) -> Case:
    """Make the case in which each rank sends to the next rank, all at the same time.

    size: the bytes of the tensor that each rank sends.
    """
    after, before = (member.rank + 1) % member.ranks, (member.rank - 1) % member.ranks
    return _exchanged(member, size, [after], [before], size)


def copy(source: int, target: int) -> Maker:
    """Return a function that makes the `Case` for measuring a copy with a given message size. One rank sends a tensor
    to another rank, and the message size is the number of bytes of the tensor.

    The target answers with a few bytes, so that the clock of the source can time the copy.
    """

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


def one_to_all(source: int, back: bool) -> Maker:
    """Return a function that makes the `Case` for a copy from rank `source` to all other ranks at the same time. The
    message size is the total number of bytes.

    back: True for the opposite direction, in which all other ranks send to rank `source`.
    """

    def make(member: Member, size: int) -> Case:
        others = [rank for rank in range(member.ranks) if rank != source]
        part = max(size // len(others), 1)
        far = others if member.rank == source else [source]
        to, by = ([], far) if (member.rank == source) == back else (far, [])
        return _exchanged(member, part, to, by, part * len(others))

    return make


def _exchanged(member: Member, size: int, to: list[int], by: list[int], counted: int) -> Case:
    """Make a `Case` in which this rank sends and receives several tensors at the same time.

    size: the bytes of each tensor.
    to: the ranks to which this rank sends.
    by: the ranks from which this rank receives.
    counted: the total number of bytes, which is divided by the measured time to get the rate.
    """
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
    """Make the `Case` of this rank from its tensors. The case fills the outgoing tensors, runs `call`, and checks the
    incoming tensors.

    size: the number of bytes for the rate.
    counts: whether the time of this rank counts.
    """

    def write(number: int) -> None:
        for tensor in incoming.values():
            tensor.zero_()  # what an earlier path left in this memory must not pass for what this one brings
        for pair, tensor in outgoing.items():
            fill(tensor, member.key(number, *pair))

    def wrong(number: int) -> str | None:
        for pair, tensor in incoming.items():
            at = first_difference(tensor, member.key(number, *pair))
            if at is not None:
                return f"on rank {member.rank}, the data of rank {pair[0]} is wrong from byte {at}"
        return None

    return Case(size, write, call, wrong, counts)


def _idle(size: int) -> Case:
    """Make the `Case` of a rank that neither sends nor receives in this measurement. Its time does not count."""
    return Case(size, lambda number: None, lambda: None, lambda number: None, counts=False)


def _wrong_sum(member: Member, tensor: Tensor, key: int, what: str) -> str | None:
    at = first_wrong_sum(tensor, member.ranks, key)
    return None if at is None else f"the sum on rank {member.rank} is wrong from byte {4 * at}{what}"
