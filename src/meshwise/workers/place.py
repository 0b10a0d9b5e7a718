"""Find the place of this process among its launcher's processes.

The place is read from environment variables. Launchers are tried from the innermost outwards; the first launcher whose
variables are set is taken.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from meshwise.spec.errors import UsageError
from meshwise.workers.places.kubernetes import of_kubernetes
from meshwise.workers.places.mpi import of_mpi
from meshwise.workers.places.place import ALONE, Place, number
from meshwise.workers.places.slurm import of_slurm
from meshwise.workers.places.torchrun import of_torchrun
from meshwise.workers.ports import port_of


def place_in(environment: Mapping[str, str]) -> Place:
    """Return the place that a launcher gave a process with these environment variables. Raises UsageError if they are
    invalid."""
    inner = of_torchrun(environment)
    if inner is not None and "LOCAL_RANK" not in environment:
        step = of_slurm(environment)  # a script under `srun` may set RANK by hand; Slurm still knows the nodes
        if step is not None and step.size == inner.size:
            return replace(step, rank=inner.rank, address=inner.address)
    if inner is None and ("OMPI_COMM_WORLD_SIZE" in environment or "MPI_LOCALRANKID" in environment):
        inner = of_mpi(environment)  # before Slurm's: mpirun's ranks inherit the variables of its daemons' Slurm step
    found = inner or of_kubernetes(environment) or of_slurm(environment) or of_mpi(environment) or ALONE
    if found.size > 1 and {"MASTER_ADDR", "MASTER_PORT"} <= environment.keys() and found.address is None:
        return replace(found, address=(environment["MASTER_ADDR"], number(environment, "MASTER_PORT")))
    return found


def address_of(place: Place) -> tuple[str, int]:
    """Return the host and the port at which the processes of a launcher meet. If the launcher does not say, it is a
    port of the first host that follows from the start's key, such as the number of a Slurm job.

    Raises UsageError if neither is known.
    """
    if place.address is not None:
        return place.address
    host = "127.0.0.1" if place.nodes == 1 else place.hosts[0] if place.hosts else ""
    if not (host and place.key):
        raise UsageError(
            f"{place.launcher or 'the launcher'} does not say where rank 0 of {place.size} is. Set MASTER_ADDR to its "
            "host and MASTER_PORT to a free port there: mpirun -x MASTER_ADDR=n1 -x MASTER_PORT=29500."
        )
    return host, port_of(place.key)
