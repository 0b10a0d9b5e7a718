"""Keep the weights of the best evaluation, and stop early.

Training ends after `patience` evaluations that were no better.

The file of the weights records the epoch and the metric. A resumed run reads the best evaluation from this file.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

from torch import nn

from meshwise.records import folder as names
from meshwise.records.metrics import Best, read_best
from meshwise.reports.recorder import current
from meshwise.spec.errors import UsageError, nearest
from meshwise.training.job.job import Job
from meshwise.training.recovery.state import RunState
from meshwise.training.recovery.weights import save_weights
from meshwise.transfer.collectives import broadcast_object
from meshwise.transfer.groups import get_rank


class BestEpoch:
    """The best evaluation of a run so far. It is equal on all ranks, since metrics cover all ranks."""

    def __init__(self, job: Job, folder: Path | None, *, resumed: bool) -> None:
        """folder: where the best weights are saved, or None. resumed: whether to read the best evaluation there."""
        self._job, self._folder = job, folder
        self._direction, _, self._metric = (job.best or "").partition(" ")
        self.found: Best | None = None
        if job.best and resumed and folder is not None:
            self.found = broadcast_object(read_best(folder) if get_rank() == 0 else None)
        if self.found is not None and f"{self.found.direction} {self.found.metric}" != job.best:
            raise UsageError(
                f"job '{job.name}': best={job.best!r}, but the resumed run was started with '{self.found.direction} "
                f"{self.found.metric}'. Use this value again, or move {folder}/{names.BEST} away."
            )

    def check(self, metrics: Mapping[str, float]) -> None:
        """Raise UsageError if `metrics` lacks the metric that `job.best` names."""
        if self._metric not in metrics:
            has = f"{', '.join(metrics)}.{nearest(self._metric, metrics)}"
            raise UsageError(f"job '{self._job.name}': best={self._job.best!r} names no metric. The metrics are {has}")

    def take(self, metrics: Mapping[str, float], epoch: int, step: int, model: nn.Module) -> bool:
        """Return whether this evaluation is the best of the run so far. If it is, save the weights."""
        if not self._metric:
            return False
        value = metrics[self._metric]
        again = self.found is not None and (self.found.step, self.found.value) == (step, value)  # repeated by a resume
        if math.isnan(value) or not (self.found is None or again or self.found.is_beaten_by(value)):
            return False
        self.found = Best(self._metric, self._direction, value, epoch, step)
        if self._folder is not None:
            with current().span("checkpoint"):
                save_weights(model, self._folder / names.BEST, self.found.header())
        return True

    def is_over(self, state: RunState) -> bool:
        """Return whether training must end because the last `job.patience` evaluations were no better than the best
        one."""
        every, unit = self._job.evaluates
        since = getattr(state, unit[:-1]) - (getattr(self.found, unit[:-1]) if self.found is not None else 0)
        return self._job.patience is not None and since >= self._job.patience * every

    def why_over(self, state: RunState) -> str:
        """Return a sentence that says why the run ended early."""
        if state.epoch >= self._job.epochs or not self.is_over(state):
            return ""
        unit = self._job.evaluates[1][:-1]
        since = f"has not been better since {unit} {getattr(self.found, unit)}" if self.found else "was never a number"
        ended = f"Ended after {unit} {getattr(state, unit)}"
        return f"{ended}: {self._metric} {since} (patience={self._job.patience})."
