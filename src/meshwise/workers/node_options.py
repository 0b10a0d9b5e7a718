"""Define the options about a run's machines, and connect the machines."""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, NoReturn

from meshwise.spec.errors import UsageError
from meshwise.spec.options import OfThisStart
from meshwise.workers.handshake import Unproven
from meshwise.workers.machines import REACH_TIMEOUT, RENDEZVOUS_TIMEOUT, Machines
from meshwise.workers.nodes import Member
from meshwise.workers.rendezvous import is_here, listens_at, secret_at, taken
from meshwise.workers.secret import SET_ONE, Secret
from meshwise.workers.store import Link, Meeting, Store

STRANGERS = 20.0  # seconds to keep trying while the process that answers does not know the secret


@dataclass(frozen=True, kw_only=True)
class NodeOptions:
    """The options about the machines of a run: their number, the index of this machine, and how to reach machine 0."""

    nnodes: Annotated[int, OfThisStart("number of machines")] = 1
    node_rank: Annotated[int, OfThisStart("index of this machine, from 0")] = 0
    rdzv: Annotated[str | None, OfThisStart("where the others reach machine 0", metavar="HOST:PORT")] = None

    def __post_init__(self) -> None:
        if self.nnodes < 1:
            raise UsageError(f"--nnodes must be at least 1, but it is {self.nnodes}.")
        if not 0 <= self.node_rank < self.nnodes:
            raise UsageError(
                f"--node-rank must be from 0 to {self.nnodes - 1} with --nnodes {self.nnodes}, but it is "
                f"{self.node_rank}."
            )

    def rendezvous(self, local_size: int, asked: Mapping[str, Any] | None = None) -> Machines | None:
        """Meet the launchers of the other machines, and wait until all are there. Return None for a run on one machine.

        local_size: the number of workers on this machine.
        asked: settings that must be equal on a machine that joins a run under way. Raises UsageError if they differ.
        """
        if self.nnodes == 1 and self.node_rank == 0 and self.rdzv is None:
            return None
        host, _, port = (self.rdzv or "").rpartition(":")
        if not host or not port.isdigit():
            raise UsageError(
                f"--rdzv {self.rdzv or 'is missing'}: this option must be the address and port of machine 0, the same "
                "on every machine, for example --rdzv node0:29500."
            )
        machines = joined((host, int(port)), self.node_rank, self.nnodes, local_size)
        machines.meet(asked)
        return machines


def joined(address: tuple[str, int], node: int, nnodes: int, local_size: int) -> Machines:
    """Connect this machine to the store of machine 0 at `address`, once it is there.
    Return the run's machines."""
    name = f"{node}.{secrets.token_hex(8)}"
    where, secret, host = f"--rdzv {address[0]}:{address[1]}", secret_at(address), listens_at(alone=is_here(address[0]))
    port, listens = (address[1], taken(address[1])) if node == 0 else (0, None)
    try:
        store = Store(secret.value, port, listens, host)
    except OSError as error:
        raise UsageError(f"the machines cannot meet at {where} ({error.strerror}). Is the port free here?") from None
    began, limit = time.monotonic(), RENDEZVOUS_TIMEOUT.total_seconds()

    def connect() -> Store | Link:
        while node != 0:
            try:
                return Link(address, secret.value, REACH_TIMEOUT)
            except OSError as error:  # machine 0 or its host name may not exist yet
                if time.monotonic() - began > (STRANGERS if isinstance(error, Unproven) else limit):
                    raise
                time.sleep(0.2)
        return store

    meeting = Meeting(connect, name)
    while not meeting.heard:
        if meeting.error is not None:
            _refuse(where, secret, meeting.error)
        time.sleep(0.01)
    host = meeting.store.host if isinstance(meeting.store, Link) else address[0]
    return Machines(meeting, store, Member(node, name, local_size, host, store.port), nnodes, secret, address)


def _refuse(where: str, secret: Secret, error: Exception) -> NoReturn:
    if isinstance(error, Unproven):
        raise UsageError(
            f"{where}: the process there does not know the secret that this machine has ({secret.source}). Start all "
            f"machines with the same --rdzv, in a folder that they share, or {SET_ONE}."
        )
    raise UsageError(f"{where} cannot be reached ({error}). Check that machine 0 is started and the port is right.")
