"""Read the variables of mpirun: Open MPI, MPICH and Intel MPI."""

from __future__ import annotations

import os
from collections.abc import Mapping

from meshwise.workers.places.place import Place, number
from meshwise.workers.places.slurm import host_list

OPEN = "OMPI_COMM_WORLD_"


def of_mpi(environment: Mapping[str, str]) -> Place | None:
    """Return the place of this process among all ranks, as mpirun's variables describe it.
    None without these."""
    if number(environment, OPEN + "SIZE", 1) > 1:
        names = [OPEN + name for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")]
        job = environment.get("PMIX_NAMESPACE") or environment.get("OMPI_MCA_ess_base_jobid", "")
        return _place("Open MPI", names, environment, job)
    if number(environment, "PMI_SIZE", 1) > 1:
        names = ["PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"]
        return _place("mpirun", names, environment, "")
    return None


def _place(launcher: str, names: list[str], environment: Mapping[str, str], job: str) -> Place:
    rank, size = number(environment, names[0]), number(environment, names[1])
    here = number(environment, names[3], size)
    hosts = environment.get("SLURM_JOB_NODELIST", "") if here < size else ""
    shared = job or environment.get("SLURM_JOB_ID") or (str(os.getppid()) if here == size else "")
    return Place(
        launcher,
        rank=rank,
        size=size,
        node=rank // here,
        nodes=-(-size // here),
        local_rank=number(environment, names[2], rank),
        tasks_here=here,
        hosts=host_list(hosts) if hosts else (),
        key=f"mpi-{shared}" if shared else "",
    )
