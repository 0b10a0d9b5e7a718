"""Define how a rank measures one path at one size.

A case says what the rank calls repeatedly, and how it sees that every byte arrived.

The data depend on the round, the rank and the part of the tensor (transfer/checksum.py), so that permuted,
swapped, stale, missing and zeroed parts are all noticed. Sums are of small whole numbers, exact in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from meshwise.torch_compat.collectives import Group
from meshwise.transfer import collectives
from meshwise.transfer.checksum import fill, first_wrong

ACK = 8
"""The size in bytes of the answer that the target of a copy sends."""


@dataclass(frozen=True)
class Case:
    """What one rank runs to measure a path or a collective at one message size."""

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
        """Return a number from which the test data of one transfer are generated."""
        return (number * self.ranks + one) * self.ranks + other


Maker = Callable[[Member, int], Case]
"""A function that makes the `Case` that a rank, given as a `Member`, runs for a message size in bytes. The size counts
the whole tensor: the result of a gather, or the input of a scatter."""
Parts = Mapping[tuple[int, int], Tensor]
"""Tensors by (source rank, target rank). If a source sends the same data to all ranks, the target is always 0."""


def all_reduce(member: Member, size: int) -> Case:
    """Return the `Case` with which a rank measures an all-reduce."""
    tensor = torch.empty(1, max(size // 4, 1), device=member.device)
    return _of_sums(member, tensor, tensor, 0, lambda: collectives.all_reduce(tensor, group=member.group))


def reduce_scatter(member: Member, size: int) -> Case:
    """Return the `Case` with which a rank measures the backend's reduce-scatter."""
    tensor = torch.empty(member.ranks, max(size // 4 // member.ranks, 1), device=member.device)
    out = torch.empty_like(tensor[:1])

    def call() -> object:
        return collectives.reduce_scatter(tensor, group=member.group, out=out, direct=False)

    return _of_sums(member, tensor, out, member.rank, call)


def broadcast(member: Member, size: int) -> Case:
    """Return the `Case` with which a rank measures the backend's broadcast from rank 0."""
    tensor = member.bytes(size)
    whole = {(0, 0): tensor}

    def call() -> object:
        return collectives.broadcast(tensor, 0, member.group, direct=False)

    return _of_parts(member, size, {} if member.rank else whole, whole, call)


def all_gather(member: Member, size: int) -> Case:
    """Return the `Case` with which a rank measures the backend's all-gather."""
    part = max(size // member.ranks, 1)
    own, out = member.bytes(part), member.bytes(member.ranks, part)

    def call() -> object:
        return collectives.all_gather(own, member.group, out=out, direct=False)

    incoming = {(rank, 0): out[rank] for rank in range(member.ranks)}
    return _of_parts(member, out.nbytes, {(member.rank, 0): own}, incoming, call)


def all_to_all(member: Member, size: int) -> Case:
    """Return the `Case` with which a rank measures the backend's all-to-all."""
    tensor, out = (member.bytes(member.ranks, max(size // member.ranks, 1)) for _ in range(2))

    def call() -> object:
        return collectives.all_to_all(tensor, member.group, out=out, direct=False)

    outgoing = {(member.rank, to): tensor[to] for to in range(member.ranks)}
    incoming = {(by, member.rank): out[by] for by in range(member.ranks)}
    return _of_parts(member, tensor.nbytes, outgoing, incoming, call)


def send_receive(member: Member, size: int) -> Case:
    """Make the case in which each rank sends to the next rank, all at the same time."""
    after, before = (member.rank + 1) % member.ranks, (member.rank - 1) % member.ranks
    sent, got = member.bytes(size), member.bytes(size)

    def call() -> None:
        collectives.send_receive([(sent, after)], [(got, before)], member.group)

    return _of_parts(member, size, {(member.rank, after): sent}, {(before, member.rank): got}, call)


def copy(source: int, target: int) -> Maker:
    """Return a function that makes the `Case` for measuring a copy with a given message size. One rank sends a tensor
    to another rank, and the message size is the number of bytes of the tensor.

    The target answers with a few bytes, so that the clock of the source can time the copy. The other ranks are idle.
    """

    def make(member: Member, size: int) -> Case:
        if member.rank not in (source, target):
            return Case(size, lambda number: None, lambda: None, lambda number: None, counts=False)
        tensor, answer = member.bytes(size), member.bytes(ACK)
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


def _of_parts(
    member: Member, size: int, outgoing: Parts, incoming: Parts, call: Callable[[], object], counts: bool = True
) -> Case:
    """Make a `Case` that fills the outgoing tensors, runs `call`, and checks the incoming ones."""

    def write(number: int) -> None:
        for tensor in incoming.values():
            tensor.zero_()  # so that leftover bytes cannot pass for received ones
        for pair, tensor in outgoing.items():
            fill(tensor, member.key(number, *pair))

    def wrong(number: int) -> str | None:
        for pair, tensor in incoming.items():
            at = first_wrong(tensor, member.key(number, *pair))
            if at is not None:
                return f"on rank {member.rank}, the data of rank {pair[0]} is wrong from byte {at}"
        return None

    return Case(size, write, call, wrong, counts)


def _of_sums(member: Member, tensor: Tensor, out: Tensor, own: int, call: Callable[[], object]) -> Case:
    """Make the `Case` of a rank that gets, in `out`, the sum over all ranks of row `own`."""

    def write(number: int) -> None:
        for part, row in enumerate(tensor):
            fill(row, member.key(number, part, member.rank))

    def wrong(number: int) -> str | None:
        at = first_wrong(out, member.key(number, own, 0), member.ranks)
        return None if at is None else f"the sum on rank {member.rank} is wrong from byte {4 * at}"

    return Case(tensor.nbytes, write, call, wrong)
