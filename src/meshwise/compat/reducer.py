"""DistributedDataParallel's reducer, driven without its wrapper around the model.

DDP's bucketing and overlap live in its C++ reducer, which its forward arms for the coming backward. Arming it right
before the backward instead leaves the model's class, hooks and state_dict keys alone, and lets a step call the model
any number of times. Read in torch 2.11, 2.13 and 2.15: `nn/parallel/distributed.py`, `_pre_forward` and
`_post_forward`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import GradBucket, Store  # type: ignore[attr-defined]
from torch.nn.parallel import DistributedDataParallel

Hook = Callable[[GradBucket], torch.futures.Future[Tensor]]


def make_reducer(
    parameters: Sequence[nn.Parameter], bucket_mb: int, hook: Hook, group: Any = None
) -> DistributedDataParallel:
    """A DDP over `parameters` alone, whose buckets are reduced by `hook` over `group`. Broadcasts those of rank 0.

    Collective. Raises RuntimeError where this torch has no reducer to arm.
    """
    holder = nn.Module()
    holder.held = nn.ParameterList(parameters)
    # No sync: the ranks hold the same already, and a parameter that is written may be waiting for a backward.
    ddp = DistributedDataParallel(holder, bucket_cap_mb=bucket_mb, init_sync=False, process_group=group)
    for name in ("_rebuild_buckets", "prepare_for_forward", "prepare_for_backward"):
        if not hasattr(ddp.reducer, name):
            raise RuntimeError(f"torch {torch.__version__} has no Reducer.{name}; meshwise needs torch 2.11 to 2.15.")
    ddp.register_comm_hook(None, lambda state, bucket: hook(bucket))
    return ddp


def arm(ddp: DistributedDataParallel) -> None:
    """The coming backward reduces gradients as they become ready. Without it, gradients stay on their rank."""
    reducer: Any = ddp.reducer
    reducer._rebuild_buckets()
    reducer.prepare_for_forward()
    reducer.prepare_for_backward([])


def version(tensor: Tensor) -> int:
    """How often `tensor` was written in place: autograd's own counter."""
    return int(tensor._version)


def base_of(tensor: Tensor) -> Tensor:
    """The tensor that autograd knows `tensor` as a view of; one that is no view is itself."""
    return tensor if tensor._base is None else tensor._base


def default_store() -> Store:
    """The key-value store that the process group was made with: it agrees on facts without a collective."""
    return dist.distributed_c10d._get_default_store()
