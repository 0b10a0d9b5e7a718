"""What a rank holds of a job while it runs. Tested with the loop, in tests/training/test_plans_in_a_loop.py."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from meshwise.recovery.clock import SaveClock
from meshwise.recovery.saving import Saver
from meshwise.recovery.state import RunState
from meshwise.spec.plan import Plan
from meshwise.training.best import BestEpoch
from meshwise.training.engine import Engine
from meshwise.training.job import Job
from meshwise.training.job_data import Data
from meshwise.training.last_step import LastStep
from meshwise.training.left_out import LeftOut
from meshwise.training.metrics_log import MetricsLog
from meshwise.training.not_finite import SkippedSteps
from meshwise.training.replica_check import ReplicaCheck
from meshwise.training.run_options import RunOptions
from meshwise.training.spikes import Spikes
from meshwise.workers.join import RankContext


@dataclass
class JobRun:
    """One rank's run of a job."""

    job: Job
    session: RankContext
    options: RunOptions
    plan: Plan
    folder: Path | None
    engine: Engine
    state: RunState
    log: MetricsLog
    best: BestEpoch
    clock: SaveClock
    train: Data
    test: Data | None
    replicas: ReplicaCheck
    left_out: LeftOut
    metrics: dict[str, float] = field(default_factory=dict)
    stopped: bool = False
    saver: Saver | None = None
    skipped: SkippedSteps | LeftOut | None = None
    spikes: Spikes | None = None
    last: LastStep | None = None
    """The state after the last step, where a launcher holds it."""
    evaluated: tuple[int, bool] = (-1, False)
    """The step after which it was evaluated last, and whether that was the best."""
    began: dict[str, int] = field(default_factory=dict)
    """The epochs and steps that were done before this session."""
