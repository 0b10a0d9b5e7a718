"""Collectives over all ranks: the one seam through which our own code communicates between processes.

Every function is a plain return for a world of one. Not covered: gradients, which DDP reduces itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def world_size() -> int:
    """How many ranks the run has; 1 outside a process group."""
    return dist.get_world_size() if dist.is_initialized() else 1


def sum_over_ranks(tensor: Tensor) -> Tensor:
    """The sum of `tensor` over all ranks, in place. Blocks the stream (CPU: the caller) until it is there."""
    if world_size() > 1:
        dist.all_reduce(tensor)
    return tensor


def begin_sum(tensor: Tensor) -> Callable[[], Tensor]:
    """Begin to sum `tensor` over all ranks in place; call the result to wait for it."""
    if world_size() == 1:
        return lambda: tensor
    work = dist.all_reduce(tensor, async_op=True)

    def wait() -> Tensor:
        work.wait()
        return tensor

    return wait


def mean_future(tensor: Tensor, ended: Callable[[], None]) -> torch.futures.Future[Tensor]:
    """Begin to average `tensor` over all ranks in place; the future gives it, and `ended` is called when it is there.

    Dividing before the sum keeps fp16 in range.
    """
    tensor.div_(world_size())
    work = dist.all_reduce(tensor, async_op=True)
    assert work is not None  # async_op=True always gives a handle to members of the group

    def result(done: torch.futures.Future[list[Tensor]]) -> Tensor:
        ended()
        return done.value()[0]

    future: torch.futures.Future[Tensor] = work.get_future().then(result)
    return future


def mean_over_ranks(tensor: Tensor) -> Tensor:
    """The mean of `tensor` over all ranks, in place."""
    return sum_over_ranks(tensor).div_(world_size())


def gather_tensors(tensor: Tensor) -> Tensor:
    """`tensor` of every rank, stacked: shape (world size, *tensor.shape)."""
    if world_size() == 1:
        return tensor.unsqueeze(0)
    parts = [torch.empty_like(tensor) for _ in range(world_size())]
    dist.all_gather(parts, tensor)
    return torch.stack(parts)


def gather_objects(value: Any) -> list[Any]:
    """`value` of every rank, in rank order; any value that pickle takes."""
    if world_size() == 1:
        return [value]
    parts: list[Any] = [None] * world_size()
    dist.all_gather_object(parts, value)
    return parts


def broadcast_object(value: Any) -> Any:
    """Rank 0's `value`, on every rank."""
    if world_size() == 1:
        return value
    box = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def broadcast_tensors(tensors: list[Tensor]) -> None:
    """Write rank 0's values into `tensors` of every rank."""
    if world_size() > 1:
        for tensor in tensors:
            dist.broadcast(tensor.detach(), src=0)


def barrier() -> None:
    """Wait until every rank is here."""
    if world_size() > 1:
        dist.barrier()
