"""Collectives over all ranks: the one seam through which our own code communicates between processes.

Every function is a plain return for a world of one, and records a span otherwise, with the number that the collective
has on every rank. Not covered: the broadcast of start values that DDP makes itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from meshwise.timeline.record import current


def world_size() -> int:
    """How many ranks the run has; 1 outside a process group."""
    return dist.get_world_size() if dist.is_initialized() else 1


def sum_over_ranks(tensor: Tensor) -> Tensor:
    """The sum of `tensor` over all ranks, in place. Blocks the stream (CPU: the caller) until it is there."""
    if world_size() > 1:
        with current().collective("all-reduce", tensor.nbytes):
            dist.all_reduce(tensor)
    return tensor


def begin_sum(tensor: Tensor) -> Callable[[], Tensor]:
    """Begin to sum `tensor` over all ranks in place; call the result to wait for it."""
    if world_size() == 1:
        return lambda: tensor
    future = _begin_all_reduce(tensor)

    def wait() -> Tensor:
        future.wait()
        return tensor

    return wait


def mean_future(tensor: Tensor) -> torch.futures.Future[Tensor]:
    """Begin to average `tensor` over all ranks in place; the future gives it. Dividing first keeps fp16 in range."""
    return _begin_all_reduce(tensor.div_(world_size()))


def _begin_all_reduce(tensor: Tensor) -> torch.futures.Future[Tensor]:
    recorder = current()
    number, start = recorder.arrive(), recorder.mark()
    code = recorder.code("communication", "all-reduce", "communication")
    work = dist.all_reduce(tensor, async_op=True)
    assert work is not None  # async_op=True always gives a handle to members of the group

    def ended(done: torch.futures.Future[list[Tensor]]) -> Tensor:
        recorder.add(code, start, recorder.mark(), tensor.nbytes, number)
        return done.value()[0]

    future: torch.futures.Future[Tensor] = work.get_future().then(ended)
    return future


def mean_over_ranks(tensor: Tensor) -> Tensor:
    """The mean of `tensor` over all ranks, in place."""
    return sum_over_ranks(tensor).div_(world_size())


def gather_tensors(tensor: Tensor) -> Tensor:
    """`tensor` of every rank, stacked: shape (world size, *tensor.shape)."""
    if world_size() == 1:
        return tensor.unsqueeze(0)
    parts = [torch.empty_like(tensor) for _ in range(world_size())]
    with current().collective("all-gather", tensor.nbytes * world_size()):
        dist.all_gather(parts, tensor)
    return torch.stack(parts)


def gather_objects(value: Any) -> list[Any]:
    """`value` of every rank, in rank order; any value that pickle takes."""
    if world_size() == 1:
        return [value]
    parts: list[Any] = [None] * world_size()
    with current().collective("all-gather", 0):
        dist.all_gather_object(parts, value)
    return parts


def broadcast_object(value: Any) -> Any:
    """Rank 0's `value`, on every rank."""
    if world_size() == 1:
        return value
    box = [value]
    with current().collective("broadcast", 0):
        dist.broadcast_object_list(box, src=0)
    return box[0]


def broadcast_tensors(tensors: list[Tensor]) -> None:
    """Write rank 0's values into `tensors` of every rank."""
    if world_size() > 1 and tensors:
        with current().collective("broadcast", sum(tensor.nbytes for tensor in tensors)):
            for tensor in tensors:
                dist.broadcast(tensor.detach(), src=0)


def barrier() -> None:
    """Wait until every rank is here."""
    if world_size() > 1:
        with current().collective("barrier", 0):
            dist.barrier()
