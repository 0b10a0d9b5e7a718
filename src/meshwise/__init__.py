"""meshwise: many devices work as one for anyone who writes PyTorch."""

from meshwise.api import launch, report, run
from meshwise.spec.errors import (
    CheckpointError,
    DataError,
    LossError,
    MeshwiseError,
    PlanError,
    UsageError,
    WorkerFailed,
)
from meshwise.spec.plan import Plan
from meshwise.training.job import Job
from meshwise.training.own_loop import accumulate, backward, distribute, load, rank, save, sum, world_size

__all__ = [
    "CheckpointError",
    "DataError",
    "Job",
    "LossError",
    "MeshwiseError",
    "Plan",
    "PlanError",
    "UsageError",
    "WorkerFailed",
    "accumulate",
    "backward",
    "distribute",
    "launch",
    "load",
    "rank",
    "report",
    "run",
    "save",
    "sum",
    "world_size",
]
