"""What a run counts of its memory by category is what its rehearsal said."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from meshwise.hardware.machines import find_machine
from meshwise.planner.estimator import rehearser
from meshwise.planner.prediction import prediction
from meshwise.records.folder import begin_session
from meshwise.reports.analyse import report_of
from meshwise.reports.read import read_timeline
from meshwise.spec.plan import Plan
from meshwise.training.job.job import Job
from meshwise.training.job.loop import run_job
from meshwise.training.job.options import RunOptions
from tests.training.job.test_plans_in_a_loop import job


def even() -> Job:
    """Batches that every plan divides, also into microbatches with batch norms."""
    x = torch.randn(40, 6)
    return replace(job(1), data=lambda: (x, x.sin()), test=None)


def train(plan: Plan, folder: str) -> Any:
    run_job(even(), RunOptions(plan=plan), Path(folder))


@pytest.mark.parametrize(
    "plan",
    [
        Plan(shard=2, accumulate=2),
        *(
            pytest.param(plan, marks=pytest.mark.slow)
            for plan in (Plan(data=2), Plan(shard=2), Plan(data=2, zero1=True))
        ),
    ],
    ids=str,
)
def test_categories_are_those_that_were_predicted(plan: Plan, pool: Any, tmp_path: Path) -> None:
    begin_session(tmp_path, time.time(), world=2, devices=["cpu", "cpu"])
    pool(2).run(train, plan, str(tmp_path))
    measured = report_of(read_timeline(tmp_path)).ranks[0].memory
    said = prediction(rehearser(even(), find_machine("2xcpu"))(plan), "net").memory
    names = ("parameters", "gradients", "optimizer", "buffers")
    assert {name: measured[name] for name in names} == {name: said[name] for name in names}
