"""Read the variables of torchrun, and of PyTorchJobs, which count pods."""

from __future__ import annotations

from collections.abc import Mapping

from meshwise.workers.places.place import Place, number
from meshwise.workers.ports import is_loopback


def of_torchrun(environment: Mapping[str, str]) -> Place | None:
    """Return the place of a process that has the variables RANK and WORLD_SIZE.
    None without these."""
    if not {"RANK", "WORLD_SIZE"} <= environment.keys():
        return None
    rank, size = number(environment, "RANK"), number(environment, "WORLD_SIZE")
    pods = {"LOCAL_RANK", "KUBERNETES_SERVICE_HOST"} & environment.keys() == {"KUBERNETES_SERVICE_HOST"}
    pods &= not is_loopback(environment.get("MASTER_ADDR", "")) or "PET_NODE_RANK" in environment
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
        address=(where[0], int(where[1])) if where[0] and where[1].isdigit() else None,
        key=f"torchrun-{environment['TORCHELASTIC_RUN_ID']}.{where[1]}" if agent else "",
    )
