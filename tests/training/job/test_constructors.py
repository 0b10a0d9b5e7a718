"""A job's constructor that draws with Python or numpy, as torch's initialisation draws with torch."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy
import pytest
import torch
from torch import nn

from meshwise.spec.plan import Plan
from meshwise.training.job.run import begun, make_engine
from meshwise.training.jobs.registry import find_job
from meshwise.workers.join import join


def lottery() -> nn.Module:
    model = nn.Linear(4, 4)
    with torch.no_grad():
        model.bias[random.randrange(4)] = float(numpy.random.rand())
    return model


def drawn(plan: Plan) -> list[float]:
    session = join()
    random.seed(session.world.rank)
    numpy.random.seed(session.world.rank)
    engine = make_engine(session, plan)
    try:
        p: Any = begun(replace(find_job("mlp"), model=lottery), plan, engine).model.bias
        found: list[float] = (p.full_tensor() if plan.shard > 1 else p).tolist()
        return found
    finally:
        engine.close()


@pytest.mark.parametrize("plan", [Plan(data=2), Plan(shard=2)])
def test_every_rank_draws_what_one_device_draws(plan: Plan, pool: Callable[[int], Any]) -> None:
    job = find_job("mlp")
    torch.manual_seed(job.seed)
    random.seed(job.seed)
    numpy.random.seed(job.seed)
    wanted = lottery().bias.tolist()  # type: ignore[union-attr,operator]
    assert pool(2).run(drawn, plan) == [wanted] * 2
