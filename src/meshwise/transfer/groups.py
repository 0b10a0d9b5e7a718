"""Define groups of ranks, and this rank's number in a group."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
import torch.distributed as dist

from meshwise.torch_compat import collectives as backend
from meshwise.torch_compat.collectives import Group

_HOST = torch.device("cpu")
DIVIDING: list[Group] = [None]
"""The group whose ranks divide the work on a batch. None means all ranks of the run."""


def divide_among(group: Group) -> None:
    """Set the group of ranks that divide the work on a batch."""
    DIVIDING[0] = group


def dividing() -> Group:
    """Return the group that was set by `divide_among`. None means all ranks of the run."""
    return DIVIDING[0]


def ranks_of(group: Group) -> tuple[int, ...]:
    """Return the ranks of a group, as numbered in the whole run."""
    return tuple(dist.get_process_group_ranks(group or DIVIDING[0]))


def device_of(group: Group) -> torch.device:
    """Return the device on which tensors for the group must be: this process's GPU with nccl, otherwise the CPU."""
    return _HOST if backend.backend_of(_HOST, group) != "nccl" else torch.device("cuda", torch.cuda.current_device())


def everyone() -> Group:
    """Return the group of all ranks of the run. None without a process group."""
    return dist.group.WORLD if dist.is_initialized() else None


def world_size(group: Group = None) -> int:
    """Return the number of ranks in the group. Returns 1 without a process group.

    group: None means the group that was set by `divide_among`.
    """
    return dist.get_world_size(group or DIVIDING[0]) if dist.is_initialized() else 1


def get_rank(group: Group = None) -> int:
    """Return this process's rank in the group. Returns 0 without a process group.

    group: None means the group that was set by `divide_among`.
    """
    return dist.get_rank(group or DIVIDING[0]) if dist.is_initialized() else 0


def group_key(group: Group = None) -> str:
    """Return a text that identifies a group and is the same on all ranks of the group."""
    return key_of(group or DIVIDING[0]) if dist.is_initialized() else ""


@functools.cache
def key_of(group: Group) -> str:
    """Return the `group_key` of a group, for callers that know that a process group exists."""
    name = "" if group in (None, everyone()) else group.group_name
    return f"{','.join(map(str, dist.get_process_group_ranks(group)))}/{name}"


def group_of(ranks: Sequence[int]) -> Group:
    """Make a process group of these ranks, in ascending order. All ranks of the run must call this, whether or not they
    belong to the new group.

    Returns None if torch.distributed is not initialized, as in a run of one rank.
    """
    return dist.new_group(sorted(set(ranks))) if dist.is_initialized() else None
