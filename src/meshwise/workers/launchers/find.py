"""Find the launcher of this process by its environment variables.

Launchers are tried from the innermost outwards; the first that recognises its variables is taken.

Tested in tests/workers/test_places.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from meshwise.workers.launchers import mpi, slurm, torchrun
from meshwise.workers.launchers.place import ALONE, Place


def place_in(environment: Mapping[str, str]) -> Place:
    """Return the place that a launcher gave a process with these environment variables. Raises UsageError if
    invalid."""
    inner = torchrun.read(environment)
    if inner is not None and "LOCAL_RANK" not in environment:
        step = slurm.read(environment)  # a script of `srun` that sets RANK by hand: where it runs is Slurm's
        if step is not None and step.size == inner.size:
            return replace(step, rank=inner.rank, rendezvous=inner.rendezvous)
    if inner is None and ("OMPI_COMM_WORLD_SIZE" in environment or "MPI_LOCALRANKID" in environment):
        inner = mpi.read(environment)  # mpirun starts its daemons by a step of Slurm, whose variables the ranks inherit
    found = inner or slurm.read(environment) or mpi.read(environment) or ALONE
    if found.size > 1 and {"MASTER_ADDR", "MASTER_PORT"} <= environment.keys() and found.rendezvous is None:
        return replace(found, rendezvous=(environment["MASTER_ADDR"], int(environment["MASTER_PORT"])))
    return found
