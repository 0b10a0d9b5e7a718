"""Log a collective in each open `comm_log`, and mark it as meshwise's.

Code that counts the program's own collectives then leaves it out.

Tested in tests/transfer/test_comm_log.py.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from meshwise.compat import collectives as backend
from meshwise.compat.collectives import Group
from meshwise.transfer import foreign
from meshwise.transfer.comm_log import OPEN, note
from meshwise.transfer.groups import dividing
from meshwise.transfer.stopwatch import Seconds, Stopwatch

Ends = tuple[int | None, int | None]
"""The sending and the receiving rank, numbered within the group. None means all ranks of the group."""
EVERYONE: Ends = (None, None)
_NOTHING = nullcontext()


def ours() -> AbstractContextManager[None]:
    """Return a context manager for the collectives that meshwise itself calls.

    The counter `Foreign` counts only the collectives of the user's program. It skips the collectives inside this
    context manager.
    """
    return foreign.ours() if foreign.OPEN else _NOTHING


def log(kind: str, size: int, device: torch.device, group: Group, seconds: Seconds, ends: Ends = EVERYONE) -> None:
    """Add a row for a collective to each open `comm_log`.

    size: the number of bytes.
    ends: the sending and the receiving rank.
    """
    group = group or dividing()
    ranks = dist.get_process_group_ranks(group)
    several = "all ranks" if group is None else f"ranks {','.join(map(str, ranks))}"
    source, target = (several if end is None else f"rank {ranks[end]}" for end in ends)
    note(kind, source, target, size, backend.backend_of(device, group), seconds)


def begin_looked_at(tensor: Tensor, group: Group) -> Future[object]:
    """Begin to sum a tensor over the group, and return the future."""
    watch, took = Stopwatch(tensor.device) if OPEN else None, list[Seconds]()
    with ours():
        begun = backend.begin_sum(tensor, group)
    if watch is None:
        return begun

    def stopped(done: Future[object]) -> object:
        took.append(watch.stop())
        return done.value()

    def seconds() -> float:
        timed.wait()
        return took[0]() if callable(took[0]) else took[0]

    timed = begun.then(stopped)
    log("all-reduce", tensor.nbytes, tensor.device, None, seconds)
    return timed
