"""Find where the nodes of a start meet to be compared."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import Annotated

from meshwise.hardware.discovery.limits import SLURM
from meshwise.spec.errors import UsageError
from meshwise.spec.options import Option
from meshwise.workers.place import Place

PORTS = range(20000, 32768)  # below the ports that a system gives to clients
WAIT, WAIT_BY_HAND = 10.0, 120.0  # seconds
HOW = (
    "Start it on each node: srun --ntasks-per-node=1 meshwise doctor --nodes. Or by hand: meshwise doctor --nnodes 2 "
    "--node-rank 0 --master-addr HOST --master-port 29500, and --node-rank 1 on the other."
)


@dataclass(frozen=True, kw_only=True)
class NodeOptions:
    """The options of `meshwise doctor` about several nodes."""

    nodes: Annotated[bool, Option("compare all nodes: started on each, by srun, torchrun or mpirun")] = False
    nnodes: Annotated[int, Option("number of nodes, started by hand")] = 1
    node_rank: Annotated[int, Option("index of this node, from 0")] = 0
    master_addr: Annotated[str | None, Option("where the others reach node 0", metavar="HOST")] = None
    master_port: Annotated[int, Option("a free port of node 0")] = 29500
    wait: Annotated[float | None, Option("seconds for all nodes to come; default: 10, by hand 120")] = None


@dataclass(frozen=True)
class Seat:
    """The place of this node among the nodes that are compared.

    host, port: where node 0 serves the store.
    key: a text that the nodes of this start share, and no other start.
    wait: the seconds to wait until all nodes have come.
    launcher: what has started the nodes, such as `Slurm`. It is empty if they were started by hand.
    hosts: the names of the nodes, as far as the launcher tells them.
    """

    node: int
    nodes: int
    host: str
    port: int
    key: str = ""
    wait: float = WAIT
    launcher: str = ""
    hosts: tuple[str, ...] = ()

    def without(self, name: str) -> str:
        """Return the line that leaves a node out."""
        return f"#SBATCH --exclude={name}" if self.launcher == SLURM else f"the other nodes, without {name}"


def seat_of(options: NodeOptions, place: Place) -> Seat | None:
    """Return the place of this node, or None if nodes are not to be compared. Raises UsageError if it is unknown."""
    if options.nnodes > 1:
        return _by_hand(options)
    if not options.nodes:
        return None
    if place.nodes < 2:
        raise UsageError(f"--nodes compares several nodes, but this process was started alone. {HOW}")
    if not place.one_a_node:
        raise UsageError(
            f"--nodes needs one process on each node, but {place.launcher} started {place.size} on {place.nodes} "
            "nodes. Use srun --ntasks-per-node=1 meshwise doctor --nodes."
        )
    known = place.rendezvous[0] if place.rendezvous else next(iter(place.hosts), None)
    if known is None:
        raise UsageError(f"{place.launcher} does not say where node 0 is. Set MASTER_ADDR and MASTER_PORT.")
    key = place.key or f"{place.rendezvous}"
    port = PORTS[zlib.crc32(f"doctor {key}".encode()) % len(PORTS)]  # not the port of the run itself
    wait = WAIT if options.wait is None else options.wait
    return Seat(place.node, place.nodes, known, port, key, wait, place.launcher, place.hosts)


def _by_hand(options: NodeOptions) -> Seat:
    if not 0 <= options.node_rank < options.nnodes:
        raise UsageError(f"--node-rank must be from 0 to {options.nnodes - 1}, but it is {options.node_rank}.")
    if options.master_addr is None:
        raise UsageError(f"--nnodes {options.nnodes} needs the address of node 0. {HOW}")
    wait = WAIT_BY_HAND if options.wait is None else options.wait
    return Seat(options.node_rank, options.nnodes, options.master_addr, options.master_port, wait=wait)
