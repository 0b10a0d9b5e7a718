"""Drive DistributedDataParallel's reducer without wrapping the model.

A C++ reducer does DDP's bucketing and overlap. DDP's forward arms it for the next backward. Arming it right
before the backward instead leaves the model's class, hooks and state_dict keys alone, and lets a step call the model
any number of times. Based on torch 2.11, 2.13 and 2.15: `nn/parallel/distributed.py`, `_pre_forward` and
`_post_forward`.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed import Store  # type: ignore[attr-defined]
from torch.distributed.utils import _verify_param_shape_across_processes
from torch.nn.parallel import DistributedDataParallel

from meshwise.torch_compat.dispatch import rehearsing

copy_each = torch._foreach_copy_
"""Copy each tensor of the second list into the tensor at the same index of the first."""
multiply_each = torch._foreach_mul_
"""Multiply each tensor of a list, in place, by one number or by a tensor that holds one."""
parts_of_bucket: Callable[[Tensor, list[Any]], list[Tensor]] = torch._C._nn.unflatten_dense_tensors
"""Return consecutive parts of a flat tensor, in the shapes of these tensors."""
data_of: Callable[[Tensor], Tensor] = vars(torch._C.TensorBase)["data"].__get__
"""Return `x.data`, also after the whole view has replaced that attribute."""
references: Callable[[int], int] = torch._C._storage_Use_Count
"""Return how many tensors share memory, given its `address`.
The storage object that gave the address counts as one."""
address = operator.attrgetter("_cdata")
_VERSION = operator.attrgetter("_version")
Hook = Callable[[Any], torch.futures.Future[Tensor]]


LARGE = 8192  # mean elements per parameter above which it is faster to divide gradients while they are copied


@dataclass(frozen=True)
class FlatBucket:
    """A bucket of gradients without torch's reducer. It has the methods of torch's `GradBucket`."""

    members: list[nn.Parameter]
    flat: Tensor

    def buffer(self) -> Tensor:
        return self.flat

    def gradients(self) -> Sequence[Tensor]:
        return parts_of_bucket(self.flat, self.members)

    def parameters(self) -> list[nn.Parameter]:
        return self.members


class PlainBucket:
    """Parameters whose gradients fit into one bucket. The bucket is full only when the backward ends, so torch's
    reducer could not send it during the backward."""

    def __init__(self, members: list[nn.Parameter], ranks: int) -> None:
        self.members, self.ranks = members, ranks
        self.size = sum(p.numel() for p in members)
        self.large = members[0].device.type == "cpu" and self.size > LARGE * len(members)
        self.kept: Tensor | None = None  # memory of the last backward's gradients, to be used again


class PlainReducer:
    """DDP's reducer written in Python, for fake tensors, which the C++ reducer cannot handle. It has the same buckets
    in the same order, and makes the same copies and collectives.

    Follows `csrc/distributed/c10d/reducer.cpp` of torch 2.13. The test tests/planner/test_plain_reducer.py compares
    it with DDP."""

    def __init__(self, ready: Sequence[nn.Parameter], bucket_mb: int, hook: Hook) -> None:
        """Divide the parameters into buckets, and add hooks to them.

        ready: the parameters, in the order in which a backward computes their gradients.
        bucket_mb: the size limit of a bucket in MiB.
        hook: a function that begins to reduce a full bucket, and returns a future."""
        self._hook = hook
        found = _assigned(ready, bucket_mb)
        each = [[ready[index] for index in bucket] for bucket in found]
        self._buckets = [FlatBucket(b, b[0].new_zeros(sum(p.numel() for p in b))) for b in each]
        self._armed, self._waiting, self._begun = False, [0] * len(found), list[torch.futures.Future[Tensor]]()
        for number, bucket in enumerate(self._buckets):
            for p, view in zip(bucket.parameters(), bucket.gradients(), strict=True):
                p.register_post_accumulate_grad_hook(functools.partial(self._ready, number, view))

    def arm(self) -> None:
        self._armed, self._begun = True, []
        self._waiting = [len(bucket.parameters()) for bucket in self._buckets]

    def _ready(self, number: int, view: Tensor, p: Tensor) -> None:
        if not self._armed or p.grad is None:
            return
        view.copy_(p.grad)
        self._waiting[number] -= 1
        while len(self._begun) < len(self._buckets) and not self._waiting[len(self._begun)]:
            self._begun.append(self._hook(self._buckets[len(self._begun)]))
            if len(self._begun) == len(self._buckets):
                torch.autograd.Variable._execution_engine.queue_callback(self._finish)

    def _finish(self) -> None:
        self._armed = False
        for bucket, future in zip(self._buckets, self._begun, strict=True):
            future.wait()
            for p, view in zip(bucket.parameters(), bucket.gradients(), strict=True):
                assert p.grad is not None
                p.grad.copy_(view)


def _assigned(ready: Sequence[Tensor], bucket_mb: int) -> list[list[int]]:
    """Return, for each bucket, the indices of its parameters."""
    found, _ = dist._compute_bucket_assignment_by_size(list(ready), [bucket_mb << 20])  # type: ignore[attr-defined]
    return found


def make_reducer(
    parameters: Sequence[nn.Parameter], bucket_mb: int, hook: Hook, group: Any = None
) -> DistributedDataParallel | PlainReducer | PlainBucket:
    """Make an object that puts the gradients of `parameters` into buckets, to be reduced over `group`. A reducer calls
    `hook` with each full bucket. If one bucket can hold all parameters, return a single `PlainBucket`, for which the
    caller must call `hook` itself. Collective."""
    if all(type(p.data) in (Tensor, FakeTensor) for p in parameters) and len(_assigned(parameters, bucket_mb)) == 1:
        if not rehearsing():
            _verify_param_shape_across_processes(group or dist.group.WORLD, list(parameters))  # type: ignore[arg-type]
        return PlainBucket([*parameters[::-1]], dist.get_world_size(group))
    if rehearsing():
        return PlainReducer(parameters[::-1], bucket_mb, hook)
    holder = nn.Module()
    holder.held = nn.ParameterList(parameters)
    # No init_sync: the ranks hold equal values, and a write to a parameter could break a pending backward.
    ddp = DistributedDataParallel(holder, bucket_cap_mb=bucket_mb, init_sync=False, process_group=group)
    ddp.register_comm_hook(None, lambda state, bucket: hook(bucket))
    return ddp


def arm(ddp: DistributedDataParallel | PlainReducer) -> None:
    """Make the next backward reduce gradients as they become ready. A backward without this call reduces nothing."""
    if isinstance(ddp, PlainReducer):
        ddp.arm()
        return
    reducer: Any = ddp.reducer
    reducer._rebuild_buckets()
    reducer.prepare_for_forward()
    reducer.prepare_for_backward([])


def version(tensor: Tensor) -> int:
    """Return autograd's count of how often `tensor` was written in place, or 0 for a tensor of `torch.inference_mode`,
    which has none."""
    try:
        return int(tensor._version)
    except RuntimeError:
        return 0


def versions(tensors: Iterable[Tensor]) -> list[int]:
    """Return the `version` of each tensor."""
    return list(map(_VERSION, tensors))


def base_of(tensor: Tensor) -> Tensor:
    """Return the tensor that `tensor` is a view of, as autograd sees it; `tensor` itself if it is not a view."""
    return tensor if tensor._base is None else tensor._base


def in_backward() -> bool:
    """Return whether this thread is running a backward. Based on torch 2.13: `autograd/graph.py`."""
    return bool(torch._C._current_graph_task_id() != -1)


def run_backward(loss: Tensor, gradient: Tensor, retain_graph: bool) -> None:
    """Run a backward that begins with this gradient of a loss. `torch.autograd.backward` would check both first."""
    engine: Any = torch.autograd._engine_run_backward  # type: ignore[attr-defined]
    engine((loss,), (gradient,), retain_graph, False, (), allow_unreachable=True, accumulate_grad=True)


def default_store() -> Store:
    """Return the key-value store of the default process group. Through the store, ranks can exchange facts without a
    collective."""
    return dist.distributed_c10d._get_default_store()


def own_connection_to_store() -> Store:
    """Return a new connection to the default store, for use in another thread. A wait on a connection blocks all of its
    users."""
    return default_store().clone()  # type: ignore[attr-defined, no-any-return]
