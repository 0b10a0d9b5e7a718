"""Give torch's collectives one behavior on every backend and version.

The functions accept any dtype, any layout and empty tensors.

The differences hidden here, as found by running torch 2.13 (gloo) and by reading 2.11 and 2.15:

- `all_gather_into_tensor` and `reduce_scatter_tensor` are called `..._single` since 2.13, and the old names warn.
- gloo supports only ten dtypes: tensors that are only moved, not reduced, are sent as bytes.
- gloo and nccl cannot add int16 or uint16, and gloo cannot add float8: a wider dtype is used. A sum of bools is `or`.
- gloo refuses non-contiguous tensors in half of its collectives: they are copied before and after.
- gloo's reduce-scatter sums everything on every rank and keeps a part, which reaches half of the link's rate. Its
  broadcast is a binomial tree: with three ranks or more, the source sends the tensor more than once. And between two
  ranks, the receiver's "ready" waits behind the data that it sends itself on the same connection, so the two
  directions of an all-gather or an all-to-all often take turns. With `direct=True`, these four are made of sends and
  receives instead, with every receive posted before any send, and reach the link's rate.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

Group = dist.ProcessGroup | None
Pairs = Sequence[tuple[Tensor, int]]
"""Tensors, each with the rank of the group that it is sent to or received from."""
OPS = {
    "sum": dist.ReduceOp.SUM,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
    "product": dist.ReduceOp.PRODUCT,
}
DIRECT_FROM = 1 << 20
"""`direct=True` has no effect on tensors of fewer bytes, because it would make them slower."""
CHUNK = 128 << 10  # bytes per message of a chain broadcast: the fastest of 32 to 512 KiB on links of 0.2 and 1 Gbit/s
_FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)
_WIDER = {torch.int16: torch.int32, torch.uint16: torch.int32, **dict.fromkeys(_FLOAT8, torch.float32)}
PLAIN = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
"""The dtypes that every backend adds without conversion, if the tensor is contiguous."""
_REDUCE_ROWS: dict[str, Callable[[Tensor], Tensor]] = {
    "sum": lambda rows: rows.sum(0, dtype=rows.dtype),
    "max": lambda rows: rows.amax(0),
    "min": lambda rows: rows.amin(0),
    "product": lambda rows: rows.prod(0, dtype=rows.dtype),
}
_BOOL_OPS = {"sum": "max", "max": "max", "min": "min", "product": "min"}
_ALL_GATHER = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
_REDUCE_SCATTER = "reduce_scatter_single" if hasattr(dist, "reduce_scatter_single") else "reduce_scatter_tensor"


def backend_of(device: torch.device, group: Group = None) -> str:
    """Return the name of the backend that communicates tensors of `device` in this group, such as `gloo` or `nccl`."""
    for pair in dist.get_backend_config(group).split(","):
        kind, _, name = pair.partition(":")
        if kind == device.type:
            return name
    return str(dist.get_backend(group))


def begun() -> int:
    """Return how many collectives, sends and receives this process has begun, as counted by the backends.

    Uses torch's private list of all process groups, `_world.pg_map` in `distributed_c10d.py` (checked in torch 2.11,
    2.13 and 2.15).
    """
    backends: set[Any] = {
        group._get_backend(device)
        for group in dist.distributed_c10d._world.pg_map
        if isinstance(group, dist.ProcessGroup)
        for device in group._device_types
    }
    return sum(backend._get_sequence_number_for_group() for backend in backends)


def all_reduce(tensor: Tensor, op: str, group: Group) -> None:
    """Reduce `tensor` over the group, in place. op: a key of OPS."""
    buffer, op = _reducible(tensor, op)
    dist.all_reduce(buffer, op=OPS[op], group=group)
    _copy_back(tensor, buffer)


def begin_sum(tensor: Tensor, group: Group = None) -> torch.futures.Future[object]:
    """Begin to sum `tensor` over the ranks of the group, in place. Return a future that is done when the sum is
    complete. If the backend cannot sum `tensor` without a copy, the sum is already complete on return."""
    buffer, op = _reducible(tensor, "sum")
    if not _same_memory(buffer, tensor):
        all_reduce(tensor, "sum", group)
        done: torch.futures.Future[object] = torch.futures.Future()
        done.set_result(None)
        return done
    work = dist.all_reduce(buffer, op=OPS[op], group=group, async_op=True)
    assert work is not None  # this rank is a member of the group
    future: torch.futures.Future[object] = work.get_future()
    return future


def all_gather(out: Tensor, tensor: Tensor, group: Group, direct: bool = False) -> None:
    """Gather `tensor` from every rank into `out`, in rank order. `out` must be contiguous, with room for the tensors of
    all ranks."""
    blocks, own = as_bytes(out).view(dist.get_world_size(group), -1), as_bytes(tensor)
    if direct and dist.get_world_size(group) == 2 and _carries(out, group):
        rank = dist.get_rank(group)
        blocks[rank].copy_(own)
        send_receive([(own, 1 - rank)], [(blocks[1 - rank], 1 - rank)], group)
    else:
        getattr(dist, _ALL_GATHER)(blocks.view(-1), own, group=group)


def reduce_scatter(out: Tensor, tensor: Tensor, op: str, group: Group, direct: bool = False) -> None:
    """Reduce `tensor` over the group, and write this rank's part of the result (along dim 0) to `out`, which must be
    contiguous."""
    source = _contiguous(tensor.detach())
    if direct and _carries(tensor, group):
        parts = torch.empty_like(source).view(dist.get_world_size(group), *out.shape)
        all_to_all(parts, source, group, direct=True)
        wide, op = _reducible(parts, op)
        out.copy_(_REDUCE_ROWS[op](wide))
        return
    (buffer, op), (target, _) = _reducible(source, op), _reducible(out, op)
    getattr(dist, _REDUCE_SCATTER)(target, buffer, op=OPS[op], group=group)
    _copy_back(out, target)


def broadcast(tensor: Tensor, source: int, group: Group, direct: bool = False) -> None:
    """Copy `tensor` of one rank into `tensor` of every other rank. source: the rank within the group that sends."""
    buffer = _contiguous(tensor.detach())
    if direct and dist.get_world_size(group) > 2 and _carries(tensor, group):
        _along_a_chain(as_bytes(buffer), source, group)
    else:
        dist.broadcast(as_bytes(buffer), group_src=source, group=group)
    _copy_back(tensor, buffer)


def all_to_all(out: Tensor, tensor: Tensor, group: Group, direct: bool = False) -> None:
    """Send part i of `tensor` to rank i, and receive part i of `out` from rank i. All parts have the same size, and
    `out` must be contiguous.

    direct: whether gloo exchanges large tensors by single sends and receives (see `DIRECT_FROM`), which is faster."""
    source, into = as_bytes(tensor), as_bytes(out)
    if not (direct and _carries(tensor, group)):
        dist.all_to_all_single(into, source, group=group)
        return
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    parts, places = source.view(size, -1), into.view(size, -1)
    places[rank].copy_(parts[rank])
    others = [peer for peer in range(size) if peer != rank]
    send_receive([(parts[p], p) for p in others], [(places[p], p) for p in others], group)


def send_receive(sends: Pairs, receives: Pairs, group: Group) -> None:
    """Send and receive all these tensors at the same time. Each tensor comes with the group rank that it is sent to or
    received from. A tensor without elements is skipped on the sending and on the receiving rank.

    All receives begin before the first send, because gloo would otherwise let the two directions between two ranks take
    turns. With nccl, all messages form one nccl group. Without a group, two ranks that both send first would wait for
    each other forever."""
    buffers = [(_contiguous(tensor.detach()), rank) for tensor, rank in receives]
    operations = [
        dist.P2POp(how, as_bytes(tensor), group=group, group_peer=rank)
        for how, posted in ((dist.irecv, buffers), (dist.isend, sends))
        for tensor, rank in posted
        if tensor.nbytes
    ]
    for work in dist.batch_isend_irecv(operations) if operations else ():
        work.wait()
    for (tensor, _), (buffer, _) in zip(receives, buffers, strict=True):
        _copy_back(tensor, buffer)


def begin_send(tensor: Tensor, target: int, group: Group) -> Callable[[], None]:
    """Begin to send `tensor` to rank `target` of the group. Return a function that waits until the send is complete.
    The data stays alive as long as the returned function does."""
    buffer = as_bytes(tensor)
    work = dist.isend(buffer, group=group, group_dst=target) if buffer.nbytes else None

    def wait(held: Tensor = buffer) -> None:
        if work is not None:
            work.wait()

    return wait


def one_way(sends: Pairs, receives: Pairs, group: Group) -> None:
    """Send the tensors of `sends`, and then receive the tensors of `receives`, one message at a time. Each tensor comes
    with the group rank that it is sent to or received from.

    The other rank must call this function or `begin_send`. It must not call `send_receive`: nccl may use different
    connections for single messages and for the messages of an nccl group, and then the messages would not meet."""
    for tensor, rank in sends:
        begin_send(tensor, rank, group)()
    for tensor, rank in receives:
        buffer = _contiguous(tensor.detach())
        work = dist.irecv(as_bytes(buffer), group=group, group_src=rank) if buffer.nbytes else None
        if work is not None:
            work.wait()
        _copy_back(tensor, buffer)


def as_bytes(tensor: Tensor) -> Tensor:
    """Return the bytes of `tensor` as a flat uint8 tensor."""
    flat = _contiguous(tensor.detach()).reshape(-1)
    # A tensor of one element is contiguous whatever its stride, but `view` still checks the stride.
    return flat.as_strided(flat.shape, (1,)).view(torch.uint8)


def _along_a_chain(buffer: Tensor, source: int, group: Group) -> None:
    """Broadcast from rank to rank in chunks: each rank passes a chunk on while the next arrives."""
    size = dist.get_world_size(group)
    at = (dist.get_rank(group) - source) % size
    before, after = (source + at - 1) % size, (source + at + 1) % size
    chunks = buffer.split(CHUNK)
    coming = [dist.irecv(chunk, group_src=before, group=group) for chunk in chunks] if at else [None] * len(chunks)
    sent = []
    for chunk, work in zip(chunks, coming, strict=True):
        if work is not None:
            work.wait()
        if at < size - 1:
            sent.append(dist.isend(chunk, group_dst=after, group=group))
    for work in sent:
        assert work is not None  # both ends are members of the group
        work.wait()


def _reducible(tensor: Tensor, op: str) -> tuple[Tensor, str]:
    """Return an equivalent tensor and op that every backend can all-reduce. The tensor is a copy if necessary."""
    tensor = tensor.detach()
    if tensor.dtype == torch.bool:
        return _contiguous(tensor).view(torch.uint8), _BOOL_OPS[op]
    return _contiguous(tensor.to(_WIDER.get(tensor.dtype, tensor.dtype))), op


def _copy_back(tensor: Tensor, buffer: Tensor) -> None:
    if not _same_memory(buffer, tensor):
        tensor.detach().copy_(buffer)


def _same_memory(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors share memory. This works for fake tensors too, which have no address."""
    return bool(torch._C._is_alias_of(one, other))  # type: ignore[attr-defined]


def _carries(tensor: Tensor, group: Group) -> bool:
    return tensor.nbytes >= max(DIRECT_FROM, 1) and backend_of(tensor.device, group) == "gloo"


def _contiguous(tensor: Tensor) -> Tensor:
    plain = tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()
    return tensor if plain else tensor.resolve_conj().resolve_neg().contiguous()
