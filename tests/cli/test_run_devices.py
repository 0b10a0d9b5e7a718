"""Where no --devices are named, a plan has as many CPU workers as it needs."""

from __future__ import annotations

import pytest
import torch

from meshwise.launcher.start import worker_slots
from meshwise.spec.plan import Plan
from meshwise.training.job.options import PlanText, RunOptions


@pytest.mark.skipif(torch.accelerator.is_available(), reason="this machine has accelerators")
@pytest.mark.parametrize(
    ("options", "workers"),
    [
        (RunOptions(), 1),
        (RunOptions(settings=("shard=4",)), 4),
        (RunOptions(settings=("recompute=full",)), 1),
        (RunOptions(plan=PlanText("data = 2\nshard = 2")), 4),
        (RunOptions(plan=Plan(data=2)), 2),
        (RunOptions(plan=PlanText("data = 2"), devices="3xcpu"), 3),
    ],
)
def test_a_plan_has_the_workers_that_it_needs(options: RunOptions, workers: int) -> None:
    assert len(worker_slots(options)) == workers
