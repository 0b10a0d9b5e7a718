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
    """From now on let "all ranks" mean the ranks of this group; None: all of the run."""
    DIVIDING[0] = group


def dividing() -> Group:
    """Return the group of "all ranks"."""
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
    """Return how many ranks divide the work, or are in the group; 1 outside a process group."""
    return dist.get_world_size(group or DIVIDING[0]) if dist.is_initialized() else 1


def get_rank(group: Group = None) -> int:
    """Return this process's rank in the group."""
    return dist.get_rank(group or DIVIDING[0]) if dist.is_initialized() else 0


def group_key(group: Group = None) -> str:
    """Return a text, the same on all ranks of a group: their numbers in the world and its name. Empty outside a process
    group."""
    return key_of(group or DIVIDING[0]) if dist.is_initialized() else ""


@functools.cache
def key_of(group: Group) -> str:
    """Return the `group_key` inside a process group."""
    name = "" if group in (None, everyone()) else group.group_name
    return f"{','.join(map(str, dist.get_process_group_ranks(group)))}/{name}"


def group_of(ranks: Sequence[int]) -> Group:
    """Make a group of these ranks, sorted; other ranks get one without being members. Collective over all ranks."""
    return dist.new_group(sorted(set(ranks))) if dist.is_initialized() else None
