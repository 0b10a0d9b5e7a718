"""What a launcher tells a process: who it is among how many, and where things are. No torch.

RANK and WORLD_SIZE are set by `meshwise run`, `mw.launch` and torchrun; under srun and mpirun they are derived from
what those set. Without any of them this process is a run of one device, and no process group is made.
Tested in tests/workers/test_join.py.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

from meshwise.spec.errors import UsageError
from meshwise.spec.world import World

DEVICE_KIND = "MESHWISE_DEVICE"
RUN_FOLDER = "MESHWISE_RUN"
"""Where this run keeps its records."""
PLAN_FILE = "MESHWISE_PLAN"
"""Names the run's plan file: `meshwise run --plan` sets it; for torchrun it is set by hand."""
BLOCKS = "MESHWISE_BLOCKS"
"""Whether the model's blocks are recorded."""
EXACT_RANDOM = "MESHWISE_EXACT_RANDOM"
"""Whether a script's random draws are those of one device: `meshwise run --exact-random` sets it."""
LOG = "MESHWISE_LOG"
"""Trackers of a script, with commas between: `meshwise run --log` sets it."""
SAVES = "MESHWISE_SAVES"
"""When a script that uses `mw.checkpoint` saves, and how many states it keeps: `meshwise run --save-every` sets it."""
CORES = "MESHWISE_CORES"
LISTENER = "MESHWISE_LISTENER"
"""A socket that rank 0 has inherited, and at which the store of the process group listens: its number."""
ATTEMPT = "MESHWISE_ATTEMPT"
"""Which attempt of the run its workers are, from 1: each start is one."""


def result_path(task: Path, rank: int) -> Path:
    """Where the worker of `rank` puts the result of `task`."""
    return task.with_name(f"result-{rank}.pickle")


def visible(index: int) -> str:
    """The driver's name of accelerator `index`, where CUDA_VISIBLE_DEVICES already hides some from us."""
    shown = [v for v in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if v]
    return shown[index] if index < len(shown) else str(index)


def started_by_launcher() -> bool:
    """Whether this process is one of several that a launcher started (ours, torchrun, srun or mpirun)."""
    return read_world(os.environ | derived_ranks(os.environ)).size > 1


def derived_ranks(environment: Mapping[str, str]) -> dict[str, str]:
    """RANK, WORLD_SIZE, LOCAL_* and MASTER_* from what srun or mpirun set; nothing where the first two are set."""
    names = _launcher_names(environment)
    if names is None or {"RANK", "WORLD_SIZE"} <= environment.keys():
        return {}
    found = {name: environment[source] for name, source in names.items() if source in environment}
    if "SLURM_STEP_TASKS_PER_NODE" in environment and names["RANK"] == "SLURM_PROCID":
        counts = tasks_of_nodes(environment["SLURM_STEP_TASKS_PER_NODE"])
        found["LOCAL_WORLD_SIZE"] = str(counts[int(environment.get("SLURM_NODEID", "0"))])
    found["MASTER_PORT"] = str(20000 + int(environment.get("SLURM_JOB_ID", "9500")) % 20000)
    if "MASTER_ADDR" not in environment:
        found["MASTER_ADDR"] = _host_of_rank_0({**found, **environment})
    return {name: value for name, value in found.items() if name not in environment}


def _launcher_names(environment: Mapping[str, str]) -> dict[str, str] | None:
    # SLURM_STEP_NUM_TASKS exists only inside srun: a batch script alone is one process, whatever SLURM_NTASKS says.
    if int(environment.get("SLURM_STEP_NUM_TASKS", "1")) > 1:
        return {"RANK": "SLURM_PROCID", "WORLD_SIZE": "SLURM_STEP_NUM_TASKS", "LOCAL_RANK": "SLURM_LOCALID"}
    if int(environment.get("OMPI_COMM_WORLD_SIZE", "1")) > 1:
        prefix = "OMPI_COMM_WORLD_"
        local = {"LOCAL_RANK": prefix + "LOCAL_RANK", "LOCAL_WORLD_SIZE": prefix + "LOCAL_SIZE"}
        return {"RANK": prefix + "RANK", "WORLD_SIZE": prefix + "SIZE", **local}
    if int(environment.get("PMI_SIZE", "1")) > 1:
        local = {"LOCAL_RANK": "MPI_LOCALRANKID", "LOCAL_WORLD_SIZE": "MPI_LOCALNRANKS"}
        return {"RANK": "PMI_RANK", "WORLD_SIZE": "PMI_SIZE", **local}
    return None


def tasks_of_nodes(text: str) -> list[int]:
    """Slurm's counts of tasks: `4(x2),3` is 4, 4 and 3 on three nodes."""
    counts: list[int] = []
    for count, repeat in re.findall(r"(\d+)(?:\(x(\d+)\))?", text):
        counts += [int(count)] * int(repeat or "1")
    return counts


def _host_of_rank_0(environment: Mapping[str, str]) -> str:
    nodes = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST")
    if nodes:
        return first_host(nodes)
    size = environment.get("WORLD_SIZE", "1")
    local_size = environment.get("LOCAL_WORLD_SIZE", size)
    if local_size != size:
        raise UsageError(
            f"{local_size} of {size} ranks are on this host, and nothing says where rank 0 is. "
            "Set MASTER_ADDR to its host, for instance with mpirun -x MASTER_ADDR=node0."
        )
    return "127.0.0.1"


def first_host(nodes: str) -> str:
    """The first host of a Slurm node list: `gpu[03-07,9],big1` gives `gpu03`."""
    match = re.match(r"([^,\[]+)(?:\[(\d+))?", nodes)
    if match is None:
        raise UsageError(f"SLURM_STEP_NODELIST={nodes!r} names no host. Set MASTER_ADDR to the host of rank 0.")
    return match[1] + (match[2] or "")


def read_world(environment: Mapping[str, str]) -> World:
    """The world that RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE describe; one device without them."""
    try:
        size = int(environment.get("WORLD_SIZE", "1"))
        rank = int(environment.get("RANK", "0"))
        local_rank = int(environment.get("LOCAL_RANK", str(rank)))
        local_size = int(environment.get("LOCAL_WORLD_SIZE", str(size)))
    except ValueError:
        raise UsageError("RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE must be whole numbers.") from None
    if not 0 <= rank < size:
        raise UsageError(f"RANK={rank} with WORLD_SIZE={size}: a rank lies between 0 and {size - 1}.")
    return World(rank, size, local_rank, local_size, environment.get(DEVICE_KIND, ""))
