"""A loss of sums over the whole batch, by `mw.sum(…, grad=True)`, trains what one device trains, under every plan."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import meshwise as mw
from meshwise.spec.errors import UsageError
from meshwise.spec.plan import Plan
from meshwise.spec.plan_file import plan_to_toml
from meshwise.training.job.job import Job
from meshwise.training.job.loop import run_job
from meshwise.training.job.options import RunOptions
from meshwise.training.process.session import default_engine
from meshwise.workers.environment import PLAN_FILE
from tests.pool import CaseFailed

Loss = Callable[[Tensor, Tensor], Tensor]
SAMPLES, BATCH = 15, 6  # batches of 6, 6 and 3: parts of 3 and 3, and of 2 and 1; of three ranks also of one each


def dice(p: Tensor, y: Tensor) -> Tensor:
    return 1 - 2 * mw.sum((p * y).sum(), grad=True) / mw.sum((p + y).sum(), grad=True)


def dice_of_classes(p: Tensor, y: Tensor) -> Tensor:
    both, each = mw.sum((p * y).sum(0), grad=True), mw.sum((p + y).sum(0), grad=True)
    return (1 - (2 * both + 1) / (each + 1)).mean()


def with_a_mean_over_samples(p: Tensor, y: Tensor) -> Tensor:
    return dice(p, y) + nn.functional.binary_cross_entropy(p, y)


def correlation(p: Tensor, y: Tensor) -> Tensor:
    a, b = p - mw.mean(p.mean(0), grad=True), y - mw.mean(y.mean(0), grad=True)
    squares = [mw.mean((one * other).mean(), grad=True) for one, other in ((a, b), (a, a), (b, b))]
    return 1 - squares[0] / (squares[1] * squares[2]).sqrt()


def mean_over_some(p: Tensor, y: Tensor) -> Tensor:
    """Over the items that are above a half, of which a rank may have none."""
    each = (p - y).square()[y > 0.5]
    total = each.sum() if len(each) else torch.zeros((), dtype=p.dtype)
    return mw.sum(total, grad=True) / mw.sum(torch.tensor(len(each), dtype=p.dtype), grad=True).clamp(min=1)


LOSSES = [dice, dice_of_classes, with_a_mean_over_samples, correlation, mean_over_some]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(3, 8), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.one(x))
        result: Tensor = self.two(hidden).sigmoid()
        return result


def data() -> TensorDataset:
    torch.manual_seed(1)
    x, y = torch.randn(SAMPLES, 4, 3, dtype=torch.float64), torch.rand(SAMPLES, 4, 2, dtype=torch.float64)
    y[3:6] = 0  # a rank's whole part of the first batch
    return TensorDataset(x, y)


def train(loss: Loss, plan: str = "", weighed: bool = False) -> tuple[list[float], list[Tensor]]:
    """The losses and the parameters after an epoch."""
    if plan:
        os.environ[PLAN_FILE] = plan
    try:
        torch.manual_seed(0)
        model: Any = Net().double()
        optimizer: Any = torch.optim.SGD(model.parameters(), 0.5, momentum=0.9)
        loader: Any = DataLoader(data(), BATCH)
        model, optimizer, loader = mw.distribute(model, optimizer, loader, view="rank")
        losses = []
        for x, y in loader:
            losses.append(float(mw.backward(loss(model(x), y), weight=float(len(x)) if weighed else None)))
            optimizer.step()
            optimizer.zero_grad()
        return losses, [getattr(p, "full_tensor", lambda p=p: p)().detach().clone() for p in model.parameters()]
    finally:
        os.environ.pop(PLAN_FILE, None)


def assert_same(got: Any, want: Any) -> None:
    torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss.__name__)
def test_it_is_that_of_one_device(loss: Loss, pool: Any) -> None:
    want = train(loss)
    assert any(not torch.equal(p, q) for p, q in zip(want[1], Net().double().parameters(), strict=True))
    for got in pool(2).run(train, loss):
        assert_same(got, want)


PLANS = [
    (2, Plan(shard=2)),
    (2, Plan(data=2, zero1=True)),
    (2, Plan(tensor=2)),
    (2, Plan(context=2)),
    (3, Plan(data=3)),
    (4, Plan(data=2, tensor=2)),
]


@pytest.mark.parametrize("ranks, plan", PLANS, ids=lambda value: str(value))
def test_under_each_plan_too(ranks: int, plan: Plan, pool: Any, tmp_path: Path) -> None:
    (tmp_path / "plan.toml").write_text(plan_to_toml(plan))
    want = train(with_a_mean_over_samples)
    for got in pool(ranks).run(train, with_a_mean_over_samples, str(tmp_path / "plan.toml")):
        assert_same(got, want)


def test_and_where_the_loss_says_its_weight(pool: Any) -> None:
    want = train(with_a_mean_over_samples)
    for got in pool(2).run(train, with_a_mean_over_samples, "", True):
        assert_same(got, want)


def penalised(p: Tensor, y: Tensor) -> Tensor:
    ratio = dice(p, y)
    (slope,) = torch.autograd.grad(ratio, p, create_graph=True)
    return ratio + mw.sum(slope.square().sum(), grad=True)


def test_a_gradient_of_it_that_is_not_mw_backwards_is_refused(pool: Any) -> None:
    with pytest.raises(CaseFailed, match=r"would return 2 times the gradient that mw\.sum.* has on one device"):
        pool(2).run(train, penalised)


def layers() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 2), nn.Sigmoid())


def job(loss: Loss, batch_size: int = BATCH) -> Job:
    def of_batch(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return loss(model(batch[0]), batch[1])

    return Job(
        "ratio", layers, of_batch, lambda parameters: torch.optim.SGD(parameters, 0.5), data, batch_size=batch_size
    )


def losses_of_job(plan: Plan, loss: Loss) -> list[float]:
    found: list[float] = run_job(
        job(loss), RunOptions(plan=replace(plan, precision="fp64")), None, lambda *a, **k: None
    )["losses"]
    return found


def test_in_a_job_as_well(pool: Any) -> None:
    want = losses_of_job(Plan(), with_a_mean_over_samples)
    for got in pool(2).run(losses_of_job, Plan(data=2), with_a_mean_over_samples):
        assert_same(got, want)


@pytest.mark.parametrize("plan", [Plan(pipeline=2, accumulate=2), Plan(data=2, accumulate=2)], ids=str)
def test_a_job_whose_backward_begins_before_its_last_forward_is_refused(plan: Plan, pool: Any) -> None:
    what = "pipeline=2, accumulate=2" if plan.pipeline > 1 else "accumulate=2"
    with pytest.raises(CaseFailed, match=rf"mw\.sum\(…, grad=True\) does not work with {what}: it needs"):
        pool(2).run(losses_of_job, plan, dice)


def as_sum() -> str:
    model, loader = mw.distribute(Net().double(), DataLoader(data(), BATCH), view="rank")
    for x, y in loader:
        with pytest.raises(UsageError) as error:
            mw.backward(dice(model(x), y), reduction="sum")
        break
    return str(error.value)


def test_it_is_no_part_of_a_sum_over_samples(pool: Any) -> None:
    assert ["would be added once per rank" in text for text in pool(2).run(as_sum)] == [True] * 2


def after_a_loop() -> str:
    model, loader = mw.distribute(Net().double(), DataLoader(data(), BATCH), view="rank")
    total = sum(model(x).sum() for x, _ in loader)
    with pytest.raises(UsageError) as error:
        mw.sum(total, grad=True)
    return str(error.value)


def test_outside_of_a_loop_it_is_refused(pool: Any) -> None:
    assert ["works only in a loss, inside the loop" in text for text in pool(2).run(after_a_loop)] == [True] * 2


def test_a_number_has_no_gradient() -> None:
    with pytest.raises(UsageError, match="needs a tensor, but got a int"):
        mw.sum(3, grad=True)


def notes_of(loss: Loss) -> list[str]:
    train(loss)
    return default_engine().notes


@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss.__name__)
def test_nothing_is_said_of_it(loss: Loss, pool: Any) -> None:
    assert pool(2).run(notes_of, loss) == [[], []]
