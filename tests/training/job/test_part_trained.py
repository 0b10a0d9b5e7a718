"""A job whose optimizer holds some of the model's parameters: gradients of the others do not add up over steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from meshwise.spec.plan import Plan
from meshwise.training.job.job import Job
from meshwise.training.job.loop import run_job
from meshwise.training.job.options import RunOptions


def samples() -> Any:
    x = torch.randn(22, 6, generator=torch.Generator().manual_seed(0))
    return x, (x.sum(1) > 0).long()


def loss(model: nn.Module, batch: Any) -> Any:
    x, y = batch
    counted = x[:, 0] > -0.5
    return nn.functional.cross_entropy(model(x)[counted], y[counted]), counted.sum()


def losses(plan: Plan) -> list[float]:
    job = Job(
        name="half",
        model=lambda: nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 2)),
        loss=loss,
        optimizer=lambda parameters: torch.optim.SGD(list(parameters)[:3], lr=0.5),
        data=samples,
        batch_size=5,
        epochs=3,
        clip_norm=0.1,
    )
    return run_job(job, RunOptions(plan=plan), folder=None)["losses"]


@pytest.mark.parametrize("plan", [Plan(data=2, precision="fp64"), Plan(shard=2, precision="fp64", accumulate=2)])
def test_the_clip_norm_is_of_one_step_on_any_number_of_devices(pool: Any, plan: Plan) -> None:
    (one,) = pool(1).run(losses, Plan(precision="fp64"))
    assert pool(2).run(losses, plan)[0] == pytest.approx(one, rel=1e-10)
