"""Trace meshwise's own collectives, and detect the program's collectives.

Backends count all collectives that begin, whoever calls them. While a `Foreign` counter is open, meshwise counts how
many of these are its own; while none is open, its collectives only check that the list `COUNTERS` is empty.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from meshwise.torch_compat import collectives as backend
from meshwise.torch_compat.collectives import Group
from meshwise.transfer.comm_log import OPEN, Seconds, Stopwatch, note
from meshwise.transfer.groups import dividing

Ends = tuple[int | None, int | None]
"""The sending and the receiving rank, numbered within the group. None means all ranks of the group."""
EVERYONE: Ends = (None, None)
_NOTHING = nullcontext()


COUNTERS: list[Foreign] = []


class Foreign:
    """A counter of the collectives that begin between its creation and the call of `close`.

    ours: how many of these collectives meshwise has called.
    """

    def __init__(self) -> None:
        self.ours = 0
        self._begun = backend.begun()
        COUNTERS.append(self)

    def close(self) -> bool:
        """Stop counting. Return whether the program itself has called a collective since the counter was created."""
        COUNTERS.remove(self)
        return backend.begun() - self._begun > self.ours


def ours() -> AbstractContextManager[None]:
    """Return a context manager for the collectives that meshwise itself calls. It must not be nested."""
    return _ours() if COUNTERS else _NOTHING


@contextmanager
def _ours() -> Iterator[None]:
    before = backend.begun()
    try:
        yield
    finally:
        count = backend.begun() - before
        for counter in COUNTERS:
            counter.ours += count


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


def begin_traced(tensor: Tensor, group: Group) -> Future[object]:
    """Begin to sum a tensor over the group, and return the future.
    Each open `comm_log` gets a row for the sum."""
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
