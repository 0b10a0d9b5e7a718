"""Find the launcher of this process by its environment variables.

Launchers are tried from the innermost outwards; the first that recognises its variables is taken.

Tested in tests/workers/test_places.py.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace

from meshwise.workers.launchers import slurm
from meshwise.workers.launchers.place import ALONE, Place, number
from meshwise.workers.launchers.slurm import host_list

LOCAL_HOSTS = ("localhost", "127.0.0.1", "::1")
OPEN = "OMPI_COMM_WORLD_"


def place_in(environment: Mapping[str, str]) -> Place:
    """Return the place that a launcher gave a process with these environment variables. Raises UsageError if
    invalid."""
    inner = _torchrun(environment)
    if inner is not None and "LOCAL_RANK" not in environment:
        step = slurm.read(environment)  # a script of `srun` that sets RANK by hand: where it runs is Slurm's
        if step is not None and step.size == inner.size:
            return replace(step, rank=inner.rank, rendezvous=inner.rendezvous)
    if inner is None and ("OMPI_COMM_WORLD_SIZE" in environment or "MPI_LOCALRANKID" in environment):
        inner = _mpi(environment)  # mpirun starts its daemons by a step of Slurm, whose variables the ranks inherit
    found = inner or slurm.read(environment) or _mpi(environment) or ALONE
    if found.size > 1 and {"MASTER_ADDR", "MASTER_PORT"} <= environment.keys() and found.rendezvous is None:
        return replace(found, rendezvous=(environment["MASTER_ADDR"], int(environment["MASTER_PORT"])))
    return found


def _torchrun(environment: Mapping[str, str]) -> Place | None:
    """Return the place of a process that has the variables RANK and WORLD_SIZE. None if one of them is missing.

    A PyTorchJob of Kubernetes sets no LOCAL_RANK. Its variables count pods instead of processes.
    """
    if not {"RANK", "WORLD_SIZE"} <= environment.keys():
        return None
    rank, size = number(environment, "RANK"), number(environment, "WORLD_SIZE")
    pods = {"LOCAL_RANK", "KUBERNETES_SERVICE_HOST"} & environment.keys() == {"KUBERNETES_SERVICE_HOST"}
    pods &= environment.get("MASTER_ADDR") not in LOCAL_HOSTS or "PET_NODE_RANK" in environment
    tasks = 1 if pods else number(environment, "LOCAL_WORLD_SIZE", size)
    agent = "TORCHELASTIC_RUN_ID" in environment
    where = environment.get("MASTER_ADDR"), environment.get("MASTER_PORT", "")
    return Place(
        "torchrun" if agent else "PyTorchJob" if pods else "",
        rank=rank,
        size=size,
        node=rank if pods else number(environment, "GROUP_RANK", rank // max(tasks, 1)),
        nodes=size if pods else number(environment, "GROUP_WORLD_SIZE", -(-size // max(tasks, 1))),
        local_rank=0 if pods else number(environment, "LOCAL_RANK", rank),
        tasks_here=tasks,
        attempt=number(environment, "TORCHELASTIC_RESTART_COUNT", 0) + 1 if agent else 0,
        hosts=(where[0],) if where[0] else (),
        rendezvous=(where[0], int(where[1])) if where[0] and where[1].isdigit() else None,
        key=f"torchrun-{environment['TORCHELASTIC_RUN_ID']}.{where[1]}" if agent else "",
    )


def _mpi(environment: Mapping[str, str]) -> Place | None:
    """Return the place of this process among all ranks, as mpirun's variables describe it. None if mpirun did not start
    it.

    The ranks of each machine are assumed to be consecutive.
    """
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
