"""Reduced precision trains as on one device, to its own rounding; what differs from one device is said."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import Subset

from meshwise.parallel.batch_norm import BATCH_NORM
from meshwise.parallel.data import DATA
from meshwise.parallel.technique import Setup
from meshwise.spec.plan import Plan
from meshwise.spec.world import World
from meshwise.training.job.job import Job
from meshwise.training.job.loop import run_job
from meshwise.training.job.options import RunOptions
from meshwise.training.jobs.mnist import mnist_mlp


def small() -> Job:
    job = mnist_mlp()
    return replace(job, data=lambda: Subset(job.data(), range(640)), test=None, epochs=3)


def losses(plan: Plan) -> Any:
    return run_job(small(), RunOptions(plan=plan), None)["losses"]


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_two_devices_train_in_reduced_precision(precision: str, pool: Any) -> None:
    (got, _) = pool(2).run(losses, Plan(data=2, precision=precision))
    full = losses(Plan())
    assert got != full  # it did compute in another precision
    torch.testing.assert_close(got, full, rtol=0.05, atol=0.02)


def notes(model: nn.Module, plan: Plan, world: World, **settings: Any) -> list[str]:
    setup = Setup(model, plan, world, **settings)
    for technique in (BATCH_NORM, DATA):
        technique.apply(setup)
    return setup.notes


def test_what_differs_from_one_device_is_said() -> None:
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Dropout(0.1))
    two = Plan(data=2)
    first, second = notes(model, two, World(size=2))
    assert first.startswith("batch norm: each rank") and second.startswith("dropout")
    assert notes(model, two, World(size=2), samples=lambda: None) == [second]
    (only,) = notes(model, Plan(accumulate=4), World())
    assert only.startswith("batch norm: accumulate=4 uses the statistics of each microbatch")
    assert notes(nn.Linear(2, 2), two, World(size=2)) == []
    assert notes(nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.0)), two, World(size=2)) == []  # it draws nothing
