"""Several machines in one run: their launchers meet in a key-value store that the first of them keeps.

They agree there on the ranks of each machine, compare what they are to run, and tell each other when a worker failed or
a halt was asked for, so that no machine goes on alone. Each beats there: one that is silent is lost to all others.
Tested in tests/workers/test_nodes.py.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Annotated

from meshwise.spec.errors import UsageError, WorkerFailed
from meshwise.spec.exit_codes import AGAIN
from meshwise.spec.options import Option
from meshwise.workers.channel import listening
from meshwise.workers.failure import Failure
from meshwise.workers.meeting import Meeting
from meshwise.workers.rendezvous import taken

if TYPE_CHECKING:  # torch is imported where machines meet: a run on one machine does not wait for it here
    from torch.distributed import Store  # type: ignore[attr-defined]

RENDEZVOUS_TIMEOUT = timedelta(minutes=10)
TELL_TIMEOUT = 3.0  # seconds for a failure to be heard by the others, before this machine leaves


class Nodes:
    """This machine among those of a run: the first rank here, the number of all ranks, where rank 0 listens.

    Waits for the others. Raises WorkerFailed where they do not come, UsageError where the store is not to be reached.
    """

    def __init__(self, meeting: Meeting, node_rank: int, nnodes: int, local_size: int, master: str) -> None:
        self._meeting, self.node_rank, self.nnodes = meeting, node_rank, nnodes
        self.master = master
        self.listener: socket.socket | None = None
        """Where rank 0 will be reached: kept from now on, so that no other program takes the port."""
        meeting.set(f"size/{node_rank}", str(local_size))
        self.sizes = [int(self._wait_for(f"size/{node}")) for node in range(nnodes)]
        if node_rank == 0:
            self.listener = listening()
            meeting.set("port", str(self.listener.getsockname()[1]))
        self.first_rank, self.size = sum(self.sizes[:node_rank]), sum(self.sizes)
        self.port = int(self._wait_for("port"))

    def set(self, key: str, value: object) -> None:
        """Tell the others."""
        self._meeting.set(key, json.dumps(value))

    def get(self, key: str) -> object:
        """What some machine tells under `key`; waits for it."""
        return json.loads(self._wait_for(key))

    def try_get(self, key: str) -> object:
        """What some machine told under `key`, or None as long as it is not known here."""
        told = self._meeting.try_get(key)
        return None if told is None else json.loads(told)

    def compare(self, facts: Mapping[str, object]) -> None:
        """All machines must have the same of these, before their workers meet. Raises UsageError on all of them."""
        self.set(f"program/{self.node_rank}", facts)
        first, *others = [self.get(f"program/{node}") for node in range(self.nnodes)]
        for node, other in enumerate(others, start=1):
            assert isinstance(first, dict) and isinstance(other, dict)
            for name in first:
                if other.get(name) != first[name]:
                    self.leave()
                    raise UsageError(
                        f"machines 0 and {node} differ in their {name}: {first[name]} and {other.get(name)}. Start "
                        "every machine with the same command, but for --node-rank and --devices."
                    )

    def lost(self) -> Failure | None:
        """A machine that is not heard of any more, as what ends the run."""
        for node, seconds in self._meeting.lost().items():
            first = sum(self.sizes[:node])
            last = first + self.sizes[node] - 1
            ranks = f"rank {first}" if last == first else f"ranks {first} to {last}"
            gone = node == 0 and self._meeting.error is not None
            why = "its launcher is gone" if gone else f"no word from it for {seconds:.1f} s"
            text = f"machine {node} of {self.nnodes} ({ranks}) is lost: {why}. See its power, network and log."
            return Failure(first, "lost", text, plain=True, exit_code=AGAIN)
        return None

    def fail(self, text: str, rank: int, exit_code: int) -> None:
        """Tell the others how this machine failed. The first keeps the store: it waits until they have heard."""
        self.set("failed", {"text": text, "rank": rank, "exit_code": exit_code})
        if 0 not in self._meeting.lost():
            self._meeting.flush(TELL_TIMEOUT)
        if self.node_rank == 0:
            self._until_all("heard", time.monotonic() + TELL_TIMEOUT)

    def failed_elsewhere(self) -> WorkerFailed | None:
        """How another machine has failed."""
        told = self.try_get("failed")
        if not isinstance(told, dict):
            return None
        self._meeting.set(f"heard/{self.node_rank}", "")
        self._meeting.flush(TELL_TIMEOUT)
        return WorkerFailed(
            f"on another machine:\n{told['text']}", rank=told["rank"], exit_code=told.get("exit_code", 1)
        )

    def leave(self) -> None:
        """All is done here. The first machine, which keeps the store, waits for those that are not lost."""
        self._meeting.set(f"left/{self.node_rank}", "")
        self._meeting.flush(TELL_TIMEOUT)
        if self.node_rank == 0:
            self._until_all("left", None)
        self._meeting.close()

    def _until_all(self, what: str, until: float | None) -> None:
        """Wait until each of the others has said so, or is lost."""
        while until is None or time.monotonic() < until:
            gone = self._meeting.lost()
            if all(node in gone or self._said(what, node) for node in range(1, self.nnodes)):
                return
            time.sleep(0.02)

    def _said(self, what: str, node: int) -> bool:
        return any(self._meeting.try_get(f"{kind}/{node}") is not None for kind in (what, "left"))

    def _wait_for(self, key: str) -> str:
        """In small waits, which a Ctrl-C ends."""
        until = time.monotonic() + RENDEZVOUS_TIMEOUT.total_seconds()
        while (told := self._meeting.try_get(key)) is None:
            if self._meeting.error is not None and not self._meeting.heard:
                raise UsageError(str(self._meeting.error).splitlines()[0])
            if lost := self.lost() if hasattr(self, "sizes") else None:
                raise WorkerFailed(lost.message, rank=lost.rank, exit_code=lost.exit_code, failure=lost)
            if time.monotonic() > until or self._meeting.error is not None:
                minutes = RENDEZVOUS_TIMEOUT.seconds // 60
                raise WorkerFailed(
                    f"not all {self.nnodes} machines came within {minutes} min. Start each with its --node-rank."
                )
            time.sleep(0.02)
        return told


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
        host, _, port = (self.rdzv or "").rpartition(":")
        if not host or not port.isdigit():
            raise UsageError(
                f"--rdzv {self.rdzv or 'is missing'}: give where machine 0 is reached, the same on every machine, "
                "for instance --rdzv node0:29500."
            )
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        first, address = self.node_rank == 0, (host, int(port))
        listens = taken(address[1]) if first else None

        def connect() -> Store:
            return TCPStore(*address, None, first, RENDEZVOUS_TIMEOUT, wait_for_workers=False, master_listen_fd=listens)

        try:
            return Nodes(Meeting(connect, self.node_rank, self.nnodes), self.node_rank, self.nnodes, local_size, host)
        except UsageError as error:
            raise UsageError(
                f"--rdzv {self.rdzv}: no meeting there ({error}). Is machine 0 started, and the port free?"
            ) from None
