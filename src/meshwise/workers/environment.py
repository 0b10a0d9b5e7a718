"""Define and read the environment variables of a process.

This module does not import torch.

RANK and WORLD_SIZE are set by `meshwise run`, `mw.launch` and torchrun; under srun and mpirun they are derived from the
variables of these launchers (place.py). Without any of these, the run has one device, and no process group is created.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from meshwise.spec.devices import WorkerSlot
from meshwise.spec.errors import UsageError
from meshwise.spec.world import World
from meshwise.workers.place import place_in

DEVICE_KIND = "MESHWISE_DEVICE"
VISIBLE = "CUDA_VISIBLE_DEVICES"
RUN_FOLDER = "MESHWISE_RUN"
"""Environment variable: the folder in which this run keeps its records."""
PLAN_FILE = "MESHWISE_PLAN"
"""Environment variable: the run's plan file. `meshwise run --plan` sets it. With torchrun, the user sets it."""
EXACT_RANDOM = "MESHWISE_EXACT_RANDOM"
"""Environment variable: whether random draws equal those on one device. `meshwise run --exact-random` sets it."""
LOG = "MESHWISE_LOG"
"""Environment variable: the trackers of a script, separated by commas. `meshwise run --log` sets it."""
SAVES = "MESHWISE_SAVES"
"""Environment variable: when a script saves and how many states it keeps. `meshwise run --save-every` sets it."""
STATES = "MESHWISE_STATES"
"""Environment variable: where a relative folder of `mw.checkpoint` lies. `meshwise run --folder` sets it."""
CORES = "MESHWISE_CORES"
LISTENER = "MESHWISE_LISTENER"
"""Environment variable: the file descriptor of the socket on which rank 0 serves the process group's store."""
ATTEMPT = "MESHWISE_ATTEMPT"
"""Environment variable: the number of the run's attempt, from 1. Each start of the workers is an attempt."""


def attempt() -> int:
    """Return the number of the run's attempt to which this process belongs, from 1."""
    return int(os.environ.get(ATTEMPT, "1"))


def result_path(task: Path, rank: int) -> Path:
    """Return the path of the file to which the worker of `rank` writes the result of `task`."""
    return task.with_name(f"result-{rank}.pickle")


def visible(index: int) -> str:
    """Return the entry of CUDA_VISIBLE_DEVICES for the accelerator that this process sees as number `index`."""
    shown = [v for v in os.environ.get(VISIBLE, "").split(",") if v]
    return shown[index] if index < len(shown) else str(index)


def started_by_launcher() -> bool:
    """Check whether this process is one of several that a launcher (meshwise, torchrun, srun or mpirun) has started."""
    return place_in(os.environ).size > 1


def read_world(environment: Mapping[str, str]) -> World:
    """Return the world of a process whose launcher has set this environment. Without a launcher, it is one device.

    Raises UsageError if the values are invalid.
    """
    place = place_in(environment)
    if not 0 <= place.rank < place.size:
        raise UsageError(f"RANK={place.rank} with WORLD_SIZE={place.size}: RANK must be from 0 to {place.size - 1}.")
    return World(place.rank, place.size, place.local_rank, place.tasks_here, environment.get(DEVICE_KIND, ""))


def loaded_with(slot: WorkerSlot) -> dict[str, str]:
    """Return the environment variables of a worker that must be set before Python and libraries are loaded."""
    return {"PYTHONUNBUFFERED": "1", **({"OMP_NUM_THREADS": str(slot.threads)} if slot.threads else {})}
