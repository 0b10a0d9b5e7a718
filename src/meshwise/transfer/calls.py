"""What each collective is: its bytes, its ends, how it begins, its result, and what a world of one has instead."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from meshwise.compat import collectives as backend
from meshwise.compat.collectives import Begun
from meshwise.spec.errors import UsageError, nearest
from meshwise.transfer.null import NullGroup
from meshwise.transfer.traced import Call, Group, own_rank, world_size

Pairs = Sequence[tuple[Tensor, int]]
"""Tensors, each with the rank to which it goes or from which it comes."""


def all_reduce(tensor: Tensor, op: str, group: Group) -> Call[Tensor]:
    """In place."""
    _check_op(op)

    def begin(later: bool) -> Begun:
        return backend.all_reduce(tensor, op, real(group), later)

    return Call("all-reduce", tensor.nbytes, tensor.device, group, begin, lambda: tensor, lambda: tensor)


def all_gather(tensor: Tensor, group: Group, out: Tensor | None, direct: bool) -> Call[Tensor]:
    """Bytes are those of all ranks."""
    size = world_size(group)
    shape = (size, *tensor.shape)
    if size == 1 and out is None:
        return _nothing_to_do("all-gather", tensor, group, tensor.unsqueeze(0))
    into = _out("all_gather", out, shape, tensor)

    def begin(later: bool) -> Begun:
        return backend.all_gather(into, tensor, real(group), later, direct)

    def alone() -> Tensor:
        return into.copy_(tensor.detach().expand(shape))

    return Call("all-gather", into.nbytes, tensor.device, group, begin, lambda: into, alone)


def reduce_scatter(tensor: Tensor, op: str, group: Group, out: Tensor | None, direct: bool) -> Call[Tensor]:
    """Bytes are those of the whole tensor."""
    _check_op(op)
    rows = _rows("reduce_scatter", tensor, group)
    if world_size(group) == 1 and out is None:
        return _nothing_to_do("reduce-scatter", tensor, group, tensor)
    into = _out("reduce_scatter", out, (rows, *tensor.shape[1:]), tensor)
    own = own_rank(group)

    def begin(later: bool) -> Begun:
        return backend.reduce_scatter(into, tensor, op, real(group), later, direct)

    def alone() -> Tensor:
        return into.copy_(tensor.detach()[own * rows : (own + 1) * rows])

    return Call("reduce-scatter", tensor.nbytes, tensor.device, group, begin, lambda: into, alone)


def broadcast(tensor: Tensor, source: int, group: Group, direct: bool) -> Call[Tensor]:
    """In place."""
    _check_rank("broadcast", "source", source, group)

    def begin(later: bool) -> Begun:
        return backend.broadcast(tensor, source, real(group), later, direct)

    ends = (source, None)
    return Call("broadcast", tensor.nbytes, tensor.device, group, begin, lambda: tensor, lambda: tensor, ends)


def broadcast_all(tensors: Sequence[Tensor]) -> Call[None]:
    """Several tensors of rank 0, one after the other, as one collective."""

    def begin(_: bool) -> Begun:
        for tensor in tensors:
            backend.broadcast(tensor, 0, None, False, direct=True).wait()
        return Begun()

    size, device = sum(tensor.nbytes for tensor in tensors), tensors[0].device
    return Call("broadcast", size, device, None, begin, _nothing, _nothing, (0, None))


def all_to_all(
    tensor: Tensor,
    group: Group,
    send: Sequence[int] | None,
    receive: Sequence[int] | None,
    out: Tensor | None,
    direct: bool,
) -> Call[Tensor]:
    """Bytes are those that this rank has for all."""
    if (send is None) != (receive is None):
        raise UsageError("all_to_all: the rows of one side alone are given. Give both send= and receive=, or neither.")
    if send is None or receive is None:
        rows = [_rows("all_to_all", tensor, group)] * world_size(group)
        into = _out("all_to_all", out, tuple(tensor.shape), tensor)
    else:
        rows = list(send)
        if len(rows) != world_size(group) or len(receive) != len(rows) or sum(rows) != len(tensor):
            raise UsageError(
                f"all_to_all: send={rows} and receive={list(receive)} for {world_size(group)} ranks and {len(tensor)} "
                "rows. Give one number a rank, and rows to send that add up to those of the tensor."
            )
        into = _out("all_to_all", out, (sum(receive), *tensor.shape[1:]), tensor)

    def begin(later: bool) -> Begun:
        return backend.all_to_all(into, tensor, receive, send, real(group), later, direct)

    def alone() -> Tensor:
        if into.shape == tensor.shape:
            into.copy_(tensor.detach())
        return into

    return Call("all-to-all", tensor.nbytes, tensor.device, group, begin, lambda: into, alone)


def exchange(sends: Pairs, receives: Pairs, group: Group, kind: str = "exchange") -> Call[None]:
    """Bytes are those that this rank sends, or those that it receives where these are more."""
    for name, pairs in (("target", sends), ("source", receives)):
        for _, rank in pairs:
            _check_peer(kind, name, rank, group)
    size = max(sum(tensor.nbytes for tensor, _ in pairs) for pairs in (sends, receives))
    device = next((tensor.device for tensor, _ in [*sends, *receives]), torch.device("cpu"))
    own = own_rank(group)
    to = sends[0][1] if len(sends) == 1 else own
    by = receives[0][1] if len(receives) == 1 else own
    ends = (own, to) if sends else (by, own)

    def begin(_: bool) -> Begun:
        return backend.exchange(sends, receives, real(group))

    return Call(kind, size, device, group, begin, _nothing, _nothing, ends, point=True)


def receive(tensor: Tensor, source: int, group: Group) -> Call[Tensor]:
    """In place."""
    _check_peer("receive", "source", source, group)

    def begin(_: bool) -> Begun:
        return backend.receive(tensor, source, real(group))

    ends = (source, own_rank(group))
    return Call("receive", tensor.nbytes, tensor.device, group, begin, lambda: tensor, lambda: tensor, ends, True)


def gather(tensor: Tensor, target: int, group: Group) -> Call[Tensor | None]:
    """Bytes are those of all ranks."""
    _check_rank("gather", "target", target, group)
    shape = (world_size(group), *tensor.shape)
    out = tensor.new_empty(shape) if own_rank(group) == target else None

    def begin(later: bool) -> Begun:
        return backend.gather(out, tensor, target, real(group), later)

    def alone() -> Tensor | None:
        return out.copy_(tensor.detach().expand(shape)) if out is not None else None

    size = tensor.nbytes * world_size(group)
    return Call("gather", size, tensor.device, group, begin, lambda: out, alone, (None, target))


def scatter(out: Tensor, parts: Tensor | None, source: int, group: Group) -> Call[Tensor]:
    """Bytes are those of all ranks."""
    _check_rank("scatter", "source", source, group)
    shape = (world_size(group), *out.shape)
    is_source = own_rank(group) == source
    if is_source and (parts is None or tuple(parts.shape) != shape or parts.dtype != out.dtype):
        has = "None" if parts is None else f"{tuple(parts.shape)} of {parts.dtype}"
        raise UsageError(f"scatter: parts are {has}. Give rank {source} parts of shape {shape} of {out.dtype}.")
    into = out if out.is_contiguous() else torch.empty_like(out, memory_format=torch.contiguous_format)
    own = own_rank(group)

    def begin(later: bool) -> Begun:
        return backend.scatter(into, parts if is_source else None, source, real(group), later)

    def result() -> Tensor:
        return out if into is out else out.copy_(into)

    def alone() -> Tensor:
        return out.copy_(parts.detach()[own]) if is_source and parts is not None else out

    size = out.nbytes * world_size(group)
    return Call("scatter", size, out.device, group, begin, result, alone, (source, None))


def barrier(group: Group) -> Call[None]:
    """Without bytes."""

    def begin(later: bool) -> Begun:
        return backend.barrier(real(group), later)

    return Call("barrier", 0, torch.device("cpu"), group, begin, _nothing, _nothing)


def _nothing() -> None:
    return None


def _nothing_to_do(kind: str, tensor: Tensor, group: Group, result: Tensor) -> Call[Tensor]:
    return Call(kind, tensor.nbytes, tensor.device, group, lambda later: Begun(), lambda: result, lambda: result)


def real(group: Group) -> backend.Group:
    """The group as torch knows it. Raises UsageError for one of a world that was only played."""
    if isinstance(group, NullGroup):
        raise UsageError("this group was made under null_collectives, which is over: make it again with group_of.")
    return group


def _check_op(op: str) -> None:
    if op not in backend.OPS:
        raise UsageError(
            f"op={op!r}: not a reduction.{nearest(op, backend.OPS)} Write one of {', '.join(backend.OPS)}."
        )


def _check_rank(verb: str, what: str, rank: int, group: Group) -> None:
    if not 0 <= rank < world_size(group):
        raise UsageError(f"{verb}: {what} {rank} of {world_size(group)} ranks. Write 0 to {world_size(group) - 1}.")


def _check_peer(verb: str, what: str, rank: int, group: Group) -> None:
    _check_rank(verb, what, rank, group)
    if rank == own_rank(group):
        raise UsageError(f"{verb}: {what} {rank} is this rank itself. Copy the tensor instead.")


def _rows(verb: str, tensor: Tensor, group: Group) -> int:
    """Rows of each rank's part."""
    size = world_size(group)
    if tensor.dim() == 0 or len(tensor) % size:
        raise UsageError(
            f"{verb}: a tensor of shape {tuple(tensor.shape)} cannot be divided equally over {size} ranks. "
            f"Pad its first dimension to a multiple of {size}."
        )
    return len(tensor) // size


def _out(verb: str, out: Tensor | None, shape: tuple[int, ...], tensor: Tensor) -> Tensor:
    if out is None:
        return torch.empty(shape, dtype=tensor.dtype, device=tensor.device)
    if tuple(out.shape) != shape or out.dtype != tensor.dtype or not out.is_contiguous():
        raise UsageError(
            f"{verb}: out= is {tuple(out.shape)} of {out.dtype}. Give a contiguous tensor of shape {shape} of "
            f"{tensor.dtype}, or none."
        )
    return out
