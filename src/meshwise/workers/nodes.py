"""Several machines in one run: their launchers meet in a key-value store that the first of them keeps.

They agree there on the ranks of each machine, and tell each other when a worker failed or a halt was asked for, so that
no machine goes on alone.
"""

from __future__ import annotations

import contextlib
import json
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Annotated

from meshwise.spec.errors import UsageError, WorkerFailed
from meshwise.spec.options import Option
from meshwise.workers.channel import free_port

if TYPE_CHECKING:  # torch is imported where machines meet: a run on one machine does not wait for it here
    from torch.distributed import Store  # type: ignore[attr-defined]

RENDEZVOUS_TIMEOUT = timedelta(minutes=10)
LEAVE_TIMEOUT = timedelta(seconds=10)


class Nodes:
    """This machine among those of a run: the first rank here, the number of all ranks, where rank 0 listens."""

    def __init__(self, store: Store, node_rank: int, nnodes: int, local_size: int, master: str) -> None:
        self._store, self.node_rank, self.nnodes = store, node_rank, nnodes
        self.master = master
        store.set(f"size/{node_rank}", str(local_size))
        if node_rank == 0:
            store.set("port", str(free_port()))
        try:
            sizes = [int(store.get(f"size/{node}")) for node in range(nnodes)]
        except RuntimeError:  # of torch.distributed, all of whose errors are such
            minutes = RENDEZVOUS_TIMEOUT.seconds // 60
            raise WorkerFailed(
                f"not all {nnodes} machines came within {minutes} min. Start each with its --node-rank."
            ) from None
        self.first_rank, self.size = sum(sizes[:node_rank]), sum(sizes)
        self.port = int(store.get("port"))

    def set(self, key: str, value: object) -> None:
        self._store.set(key, json.dumps(value))

    def get(self, key: str) -> object:
        """What some machine tells under `key`; waits for it."""
        return json.loads(self._store.get(key))

    def try_get(self, key: str) -> object:
        """What some machine told under `key`, or None; None too when the first machine, which keeps it, is gone."""
        try:
            return json.loads(self._store.get(key)) if self._store.check([key]) else None
        except RuntimeError:
            return None

    def leave(self) -> None:
        """All is done here. The first machine, which keeps the store, waits for the others, but not for ever."""
        with contextlib.suppress(RuntimeError):
            if self.node_rank:
                self._store.set(f"left/{self.node_rank}", "")
            else:
                self._store.wait([f"left/{node}" for node in range(1, self.nnodes)], LEAVE_TIMEOUT)


@dataclass(frozen=True, kw_only=True)
class NodeOptions:
    """The machines that run together: how many, which this is, and where machine 0 is reached."""

    nnodes: Annotated[int, Option("machines that take part", recorded=False)] = 1
    node_rank: Annotated[int, Option("which of them this is, from 0", recorded=False)] = 0
    rdzv: Annotated[
        str | None, Option("where machine 0 is reached by the others", metavar="HOST:PORT", recorded=False)
    ] = None

    def __post_init__(self) -> None:
        if self.nnodes < 1:
            raise UsageError(f"--nnodes {self.nnodes}: at least one machine takes part. Use --nnodes 1 or more.")
        if not 0 <= self.node_rank < self.nnodes:
            raise UsageError(
                f"--node-rank {self.node_rank} of --nnodes {self.nnodes}: machines are counted from 0 "
                f"to {self.nnodes - 1}."
            )

    def rendezvous(self, local_size: int) -> Nodes | None:
        """Meet the launchers of the other machines; None when there is one machine. Blocks until all are there."""
        if self.nnodes == 1 and self.node_rank == 0 and self.rdzv is None:
            return None
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        host, _, port = (self.rdzv or "").rpartition(":")
        if not host or not port.isdigit():
            raise UsageError(
                f"--rdzv {self.rdzv or 'is missing'}: give where machine 0 is reached, the same on every machine, "
                "for instance --rdzv node0:29500."
            )
        try:
            store = TCPStore(host, int(port), None, self.node_rank == 0, RENDEZVOUS_TIMEOUT, wait_for_workers=False)
        except RuntimeError as error:
            why = str(error).splitlines()[0]
            raise UsageError(
                f"--rdzv {self.rdzv}: no meeting there ({why}). Is machine 0 started, and the port free?"
            ) from None
        return Nodes(store, self.node_rank, self.nnodes, local_size, host)
