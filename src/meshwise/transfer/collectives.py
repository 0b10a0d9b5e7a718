"""Collectives over all ranks or a group: the one seam through which our own code communicates between processes.

Every function is a plain return for a world of one, and records a span otherwise, with the number that the collective
has on every rank. `begin_...` returns a function that waits for the result. Tensors of any dtype, layout and size are
right, also under gloo (compat/collectives.py says how). Under `null_collectives` nothing moves. Ranks of a group are
counted within it. Not covered: the broadcast of start values that DDP makes itself.

`direct`: gloo's all-gather (of two ranks), all-to-all, reduce-scatter and broadcast are replaced by sends and receives
where those reach more of the link's rate; False leaves them to the backend, as DDP and FSDP2 use it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from meshwise.timeline.recorder import current
from meshwise.transfer import calls
from meshwise.transfer.null import null_group, null_world
from meshwise.transfer.traced import Group as Group
from meshwise.transfer.traced import begun_future, later, now
from meshwise.transfer.traced import own_rank as own_rank
from meshwise.transfer.traced import ranks_of as ranks_of
from meshwise.transfer.traced import world_size as world_size


def group_of(ranks: Sequence[int]) -> Group:
    """A group of these ranks, sorted; the others get one that they are no members of. Collective over all ranks."""
    chosen = sorted(set(ranks))
    if null_world() is not None or not dist.is_initialized():
        return null_group(chosen)
    group: dist.ProcessGroup = dist.new_group(chosen)
    return group


def all_reduce(tensor: Tensor, op: str = "sum", group: Group = None) -> Tensor:
    """`tensor` reduced over the ranks, in place. op: `sum`, `max`, `min` or `product`; a sum of bools is `or`."""
    return now(calls.all_reduce(tensor, op, group))


def begin_all_reduce(tensor: Tensor, op: str = "sum", group: Group = None) -> Callable[[], Tensor]:
    """Begin `all_reduce`; call the result to wait for it."""
    return later(calls.all_reduce(tensor, op, group))


def all_gather(tensor: Tensor, group: Group = None, *, out: Tensor | None = None, direct: bool = True) -> Tensor:
    """`tensor` of every rank, stacked: shape (ranks, *tensor.shape). out: a contiguous tensor to write it into."""
    return now(calls.all_gather(tensor, group, out, direct))


def begin_all_gather(
    tensor: Tensor, group: Group = None, *, out: Tensor | None = None, direct: bool = True
) -> Callable[[], Tensor]:
    """Begin `all_gather`; call the result to wait for it."""
    return later(calls.all_gather(tensor, group, out, direct))


def reduce_scatter(
    tensor: Tensor, op: str = "sum", group: Group = None, *, out: Tensor | None = None, direct: bool = True
) -> Tensor:
    """This rank's part of the first dimension of `tensor`, reduced over the ranks. UsageError for unequal parts."""
    return now(calls.reduce_scatter(tensor, op, group, out, direct))


def begin_reduce_scatter(
    tensor: Tensor, op: str = "sum", group: Group = None, *, out: Tensor | None = None, direct: bool = True
) -> Callable[[], Tensor]:
    """Begin `reduce_scatter`; call the result to wait for it."""
    return later(calls.reduce_scatter(tensor, op, group, out, direct))


def broadcast(tensor: Tensor, source: int = 0, group: Group = None, *, direct: bool = True) -> Tensor:
    """`tensor` of rank `source`, on every rank, in place."""
    return now(calls.broadcast(tensor, source, group, direct))


def begin_broadcast(tensor: Tensor, source: int = 0, group: Group = None) -> Callable[[], Tensor]:
    """Begin `broadcast`, always the backend's own; call the result to wait for it."""
    return later(calls.broadcast(tensor, source, group, False))


def all_to_all(
    tensor: Tensor,
    group: Group = None,
    *,
    send: Sequence[int] | None = None,
    receive: Sequence[int] | None = None,
    out: Tensor | None = None,
    direct: bool = True,
) -> Tensor:
    """Part i of `tensor` goes to rank i; part i of the result is what rank i had for this one.

    send, receive: rows of the parts, both or none; without them the first dimension is divided equally.
    """
    return now(calls.all_to_all(tensor, group, send, receive, out, direct))


def begin_all_to_all(
    tensor: Tensor,
    group: Group = None,
    *,
    send: Sequence[int] | None = None,
    receive: Sequence[int] | None = None,
    out: Tensor | None = None,
    direct: bool = True,
) -> Callable[[], Tensor]:
    """Begin `all_to_all`; call the result to wait for it."""
    return later(calls.all_to_all(tensor, group, send, receive, out, direct))


def send(tensor: Tensor, target: int, group: Group = None) -> None:
    """Send `tensor` to rank `target`, which calls `receive`."""
    begin_send(tensor, target, group)()


def begin_send(tensor: Tensor, target: int, group: Group = None) -> Callable[[], None]:
    """Begin `send`; call the result to wait until `tensor` may be written again."""
    return later(calls.exchange([(tensor, target)], [], group, "send"))


def receive(tensor: Tensor, source: int, group: Group = None) -> Tensor:
    """Write what rank `source` sends into `tensor`, of the same shape and dtype."""
    return begin_receive(tensor, source, group)()


def begin_receive(tensor: Tensor, source: int, group: Group = None) -> Callable[[], Tensor]:
    """Begin `receive`; call the result to wait for it."""
    return later(calls.receive(tensor, source, group))


def exchange(sends: Sequence[tuple[Tensor, int]], receives: Sequence[tuple[Tensor, int]], group: Group = None) -> None:
    """Send (tensor, rank) pairs and receive into (contiguous tensor, rank) pairs, all at once."""
    begin_exchange(sends, receives, group)()


def begin_exchange(
    sends: Sequence[tuple[Tensor, int]], receives: Sequence[tuple[Tensor, int]], group: Group = None
) -> Callable[[], None]:
    """Begin `exchange`; call the result to wait for it."""
    return later(calls.exchange(sends, receives, group))


def gather(tensor: Tensor, target: int = 0, group: Group = None) -> Tensor | None:
    """`tensor` of every rank, stacked, on rank `target`; None on the others."""
    return now(calls.gather(tensor, target, group))


def begin_gather(tensor: Tensor, target: int = 0, group: Group = None) -> Callable[[], Tensor | None]:
    """Begin `gather`; call the result to wait for it."""
    return later(calls.gather(tensor, target, group))


def scatter(out: Tensor, parts: Tensor | None = None, source: int = 0, group: Group = None) -> Tensor:
    """Write part i of rank `source`'s `parts`, of shape (ranks, *out.shape), into `out` of rank i."""
    return now(calls.scatter(out, parts, source, group))


def begin_scatter(
    out: Tensor, parts: Tensor | None = None, source: int = 0, group: Group = None
) -> Callable[[], Tensor]:
    """Begin `scatter`; call the result to wait for it."""
    return later(calls.scatter(out, parts, source, group))


def barrier(group: Group = None) -> None:
    """Wait until every rank is here."""
    now(calls.barrier(group))


def begin_barrier(group: Group = None) -> Callable[[], None]:
    """Begin `barrier`; call the result to wait for the others."""
    return later(calls.barrier(group))


def sum_over_ranks(tensor: Tensor) -> Tensor:
    """The sum of `tensor` over all ranks, in place. Blocks the stream (CPU: the caller) until it is there."""
    return all_reduce(tensor)


def begin_sum(tensor: Tensor) -> Callable[[], Tensor]:
    """Begin to sum `tensor` over all ranks in place; call the result to wait for it."""
    return begin_all_reduce(tensor)


def mean_future(tensor: Tensor) -> torch.futures.Future[Tensor]:
    """Begin to average `tensor` over all ranks in place; the future gives it. Dividing first keeps fp16 in range."""
    return begun_future(calls.all_reduce(tensor.div_(world_size()), "sum", None))


def mean_over_ranks(tensor: Tensor) -> Tensor:
    """The mean of `tensor` over all ranks, in place."""
    return all_reduce(tensor).div_(world_size())


def gather_tensors(tensor: Tensor) -> Tensor:
    """`tensor` of every rank, stacked: shape (world size, *tensor.shape)."""
    return all_gather(tensor)


def gather_objects(value: Any, group: Group = None) -> list[Any]:
    """`value` of every rank, in rank order; any value that pickle takes."""
    size = world_size(group)
    if size == 1 or null_world() is not None:
        return [value] * size
    parts: list[Any] = [None] * size
    if group is not None:
        dist.all_gather_object(parts, value, group=calls.real(group))
        return parts
    with current().collective("all-gather", 0):
        dist.all_gather_object(parts, value)
    return parts


def broadcast_object(value: Any) -> Any:
    """Rank 0's `value`, on every rank."""
    if world_size() == 1 or null_world() is not None:
        return value
    box = [value]
    with current().collective("broadcast", 0):
        dist.broadcast_object_list(box, src=0)
    return box[0]


def broadcast_tensors(tensors: list[Tensor]) -> None:
    """Write rank 0's values into `tensors` of every rank."""
    if tensors:
        now(calls.broadcast_all(tensors))
