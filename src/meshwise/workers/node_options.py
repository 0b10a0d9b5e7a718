"""Define the options about a run's machines."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from meshwise.spec.errors import UsageError
from meshwise.spec.options import OfThisStart
from meshwise.workers.places.place import Place

PORT = 29500  # the default of torchrun


@dataclass(frozen=True, kw_only=True)
class NodeOptions:
    """The options about the machines of a run: their number, the index of this machine, and where machine 0 is."""

    nnodes: Annotated[int, OfThisStart("number of machines")] = 1
    node_rank: Annotated[int, OfThisStart("index of this machine, from 0")] = 0
    master_addr: Annotated[str | None, OfThisStart("where the others reach machine 0", metavar="HOST")] = None
    master_port: Annotated[int, OfThisStart("a free port of machine 0", metavar="PORT")] = PORT
    rdzv_endpoint: Annotated[str | None, OfThisStart("both in one word, as of torchrun", metavar="HOST:PORT")] = None

    def __post_init__(self) -> None:
        if self.nnodes < 1:
            raise UsageError(f"--nnodes must be at least 1, but it is {self.nnodes}.")
        if not 0 <= self.node_rank < self.nnodes:
            raise UsageError(
                f"--node-rank must be from 0 to {self.nnodes - 1} with --nnodes {self.nnodes}, but it is "
                f"{self.node_rank}."
            )

    @property
    def address(self) -> tuple[str, int] | None:
        """Where machine 0 is. None if no option says it."""
        if self.rdzv_endpoint is None:
            return None if self.master_addr is None else (self.master_addr, self.master_port)
        host, _, port = self.rdzv_endpoint.rpartition(":")
        if self.master_addr is not None:
            raise UsageError("--rdzv-endpoint means --master-addr and --master-port. Use only one of these.")
        if not host or not port.isdigit():
            raise UsageError(
                f"--rdzv-endpoint {self.rdzv_endpoint}: write the address and port of machine 0, the same on every "
                "machine: --rdzv-endpoint node0:29500."
            )
        return host, int(port)

    def place(self) -> Place | None:
        """Return this machine's place in a run whose machines were started by hand. None on one machine."""
        if self.nnodes == 1:
            return None
        if self.address is None:
            raise UsageError(
                "--master-addr is missing: name machine 0, the same on every machine: --master-addr node0 "
                f"--master-port {PORT}."
            )
        node, nodes = self.node_rank, self.nnodes
        return Place(rank=node, size=nodes, node=node, nodes=nodes, address=self.address)
