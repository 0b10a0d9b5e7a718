"""With exact draws, dropout on N devices is that of one: losses within 1e-9 in float64, under any plan."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import meshwise as mw
from meshwise.spec.plan import Plan
from meshwise.training.data.keyed import Rows, by_rows
from meshwise.training.job.loop import run_job
from meshwise.training.job.options import RunOptions
from meshwise.training.process.session import default_engine, end_sessions
from meshwise.workers.environment import EXACT_RANDOM


class Net(nn.Module):
    """Dropout in layers, in attention, and beside positions."""

    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(6, 16)
        layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.3, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.out = nn.Sequential(nn.Dropout(0.2), nn.Linear(16, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.layers(self.into(x)).flatten(0, 1)).view(len(x), -1)


def losses(plan: Plan, exact: bool = True) -> Any:
    x = torch.randn(27, 3, 6, generator=torch.Generator().manual_seed(1))  # batches of 8, 8, 8, 3
    job = mw.Job(
        name="dropout",
        model=Net,
        loss=lambda model, batch: nn.functional.mse_loss(model(batch[0]), batch[1]),
        optimizer=lambda params: torch.optim.Adam(params, lr=0.01),
        data=lambda: (x, x.sum(2)),
        batch_size=8,
    )
    result = run_job(job, RunOptions(plan=replace(plan, precision="fp64"), log_every=1, exact_random=exact), None)
    assert any(note.startswith("dropout:") for note in result["notes"]) is (not exact and plan.devices > 1)
    assert not any("--exact-random" in note for note in result["notes"])
    return result["losses"]


PLANS = [Plan(data=2), Plan(shard=3, recompute="full"), Plan(data=4, zero1=True), Plan(data=2, shard=2)]


@pytest.mark.parametrize(
    "plan", [pytest.param(p, marks=[pytest.mark.slow] * (p.devices == 4)) for p in PLANS], ids=repr
)
def test_dropout_is_that_of_one_device(plan: Plan, pool: Any) -> None:
    want = losses(Plan())
    for got in pool(plan.devices).run(losses, plan):
        assert got == pytest.approx(want, abs=1e-9)


def test_without_it_ranks_draw_their_own(pool: Any) -> None:
    (got, _) = pool(2).run(losses, Plan(data=2), False)
    assert max(abs(a - b) for a, b in zip(got, losses(Plan(), False), strict=True)) > 1e-3


def script(recompute: bool) -> Any:
    """The losses of a script with dropout, attention and noise of its own."""
    end_sessions()
    os.environ[EXACT_RANDOM] = "1"
    try:
        torch.manual_seed(2)
        x = torch.randn(27, 3, 6, dtype=torch.float64)
        model = Net().double()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        batches = DataLoader(TensorDataset(x, x.sum(2)), batch_size=8, shuffle=True)
        plan = Plan(data=mw.world_size(), recompute="full") if recompute else None
        model, optimizer, batches = mw.distribute(model, optimizer, batches, plan=plan, view="rank")
        losses = []
        for _ in range(2):
            for inputs, targets in batches:
                inputs = inputs + 0.1 * torch.randn_like(inputs) * torch.randint(2, (len(inputs), 1, 1))
                loss = nn.functional.mse_loss(model(inputs), targets)
                losses.append(float(mw.backward(loss)))
                optimizer.step()
                optimizer.zero_grad()
        assert not [note for note in default_engine().notes if "keyed" in note]
        return losses
    finally:
        del os.environ[EXACT_RANDOM]
        end_sessions()


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize("recompute", [False, True])
def test_a_script_draws_what_one_device_draws(recompute: bool, size: int, pool: Any) -> None:
    want = script(recompute)
    for got in pool(size).run(script, recompute):
        assert got == pytest.approx(want, abs=1e-9)


def test_draws_differ_from_step_to_step_and_with_accumulation(pool: Any) -> None:
    want = losses(Plan(accumulate=2))
    assert want != losses(Plan())
    for got in pool(2).run(losses, Plan(data=2, accumulate=2)):
        assert got == pytest.approx(want, abs=1e-9)


@pytest.mark.parametrize(
    ("shape", "placed"),
    [
        ((4, 7), ((8, 7), 0)),
        ((7, 4), ((7, 8), 1)),
        ((12, 7), ((24, 7), 0)),  # heads beside samples
        ((4, 4), ((8, 4), 0)),
        ((7, 5), None),
        ((), ((), None)),
        ((1, 1), ((1, 1), None)),
    ],
)
def test_where_the_batch_is(shape: Any, placed: Any) -> None:
    assert by_rows(Rows(0, 4, 8, 4))(0, "bernoulli_", shape) == placed
