"""Every built-in job, on one to four devices, has the losses of a plain loop that imports only torch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils.data import Subset

from meshwise.jobs.registry import find_job
from meshwise.spec.plan import Plan
from meshwise.training.job import Job
from meshwise.training.loop import run_job
from meshwise.training.settings import Settings

STEPS = 50
TOLERANCE = {"fp32": 1e-5, "fp64": 1e-10}
# Small batches, and data sets that end in a ragged batch several times within 50 steps: (samples, batch size).
SIZES = {"mnist-mlp": (595, 64), "mnist-cnn": (400, 32), "mlp": (203, 20), "gpt": (58, 6)}


def small_job(name: str) -> Job:
    samples, batch_size = SIZES[name]
    job = find_job(name)
    per_epoch = -(-samples // batch_size)
    return replace(job, data=lambda: Subset(job.data(), range(samples)), test=None, batch_size=batch_size, epochs=-(-STEPS // per_epoch))


def plain_loop(job: Job, dtype: torch.dtype, samples: int) -> list[float]:
    """What a user would write: one device, the whole batch at once."""
    torch.manual_seed(job.seed)
    model = job.model().to(dtype)
    optimizer = job.optimizer(model.parameters())
    scheduler = job.scheduler(optimizer) if job.scheduler else None
    data, losses = job.data(), []
    for epoch in range(job.epochs):
        order = torch.randperm(samples, generator=torch.Generator().manual_seed(job.seed * 2**32 + epoch))
        for indices in order.split(job.batch_size):
            batch = tuple(t.to(dtype) if t.is_floating_point() else t for t in data.dataset.batch(indices))
            loss = job.loss(model, batch)
            loss = loss[0] if isinstance(loss, tuple) else loss
            loss.backward()
            if job.clip_norm:
                torch.nn.utils.clip_grad_norm_(model.parameters(), job.clip_norm)
            optimizer.step()
            optimizer.zero_grad()
            if scheduler:
                scheduler.step()
            losses.append(loss.item())
    return losses[:STEPS]


_plain: dict[Any, list[float]] = {}


def plain_losses(name: str, precision: str) -> list[float]:
    key = name, precision
    if key not in _plain:
        _plain[key] = plain_loop(small_job(name), torch.float64 if precision == "fp64" else torch.float32, SIZES[name][0])
    return _plain[key]


def ours(name: str, plan: Plan) -> list[float]:
    return run_job(small_job(name), Settings(plan, log_every=17), folder=None)["losses"][:STEPS]


@pytest.mark.parametrize("precision", ["fp32", "fp64"])
@pytest.mark.parametrize("accumulate", [1, 2, 4])
@pytest.mark.parametrize("devices", [1, 2, 3, 4])
@pytest.mark.parametrize("name", sorted(SIZES))
def test_losses_are_those_of_a_plain_loop(name: str, devices: int, accumulate: int, precision: str, pool: Any) -> None:
    plan = Plan(data=devices, accumulate=accumulate, precision=precision)
    results = [ours(name, plan)] if devices == 1 else pool(devices).run(ours, name, plan)
    for losses in results:
        torch.testing.assert_close(losses, plain_losses(name, precision), rtol=TOLERANCE[precision], atol=0)
