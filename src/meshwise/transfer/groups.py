"""Define groups of ranks, and this rank's place among them.

Tested in tests/transfer/test_collectives.py.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
import torch.distributed as dist

from meshwise.compat import collectives as backend
from meshwise.compat.collectives import Group

_HOST = torch.device("cpu")
DIVIDING: list[Group] = [None]
"""The group whose ranks divide the work on a batch; None: all ranks of the run."""


def divide_among(group: Group) -> None:
    """Let "all ranks" mean the ranks of this group from now on; None: all ranks of the run."""
    DIVIDING[0] = group


def dividing() -> Group:
    """Return the group that "all ranks" means; None for the whole run."""
    return DIVIDING[0]


def ranks_of(group: Group) -> tuple[int, ...]:
    """Return the ranks of a group, as numbered in the whole run."""
    return tuple(dist.get_process_group_ranks(group or DIVIDING[0]))


def device_of(group: Group) -> torch.device:
    """Return the device of the group's tensors: this process's accelerator with nccl, else the CPU."""
    return _HOST if backend.backend_of(_HOST, group) != "nccl" else torch.device("cuda", torch.cuda.current_device())


def everyone() -> Group:
    """Return the group of the whole run."""
    return dist.group.WORLD if dist.is_initialized() else None


def world_size(group: Group = None) -> int:
    """Return the number of ranks in the group (None: of "all ranks"); 1 without a process group."""
    return dist.get_world_size(group or DIVIDING[0]) if dist.is_initialized() else 1


def get_rank(group: Group = None) -> int:
    """Return this process's rank in the group (None: among "all ranks"); 0 without a process group."""
    return dist.get_rank(group or DIVIDING[0]) if dist.is_initialized() else 0


def group_key(group: Group = None) -> str:
    """Return a text that is the same on all ranks of a group: their ranks in the world, and the group's name. ""
    without a process group."""
    return key_of(group or DIVIDING[0]) if dist.is_initialized() else ""


@functools.cache
def key_of(group: Group) -> str:
    """Return the `group_key` of a group, for callers that know that a process group exists."""
    name = "" if group in (None, everyone()) else group.group_name
    return f"{','.join(map(str, dist.get_process_group_ranks(group)))}/{name}"


def group_of(ranks: Sequence[int]) -> Group:
    """Make a group of these ranks, in ascending order. All ranks of the run must call this, members or not."""
    return dist.new_group(sorted(set(ranks))) if dist.is_initialized() else None
