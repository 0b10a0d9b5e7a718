"""`loss = mw.backward(loss)` is the global loss for people to read, in each form of a training loop.

Of torch_compat/loss_scale.py too.
"""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import meshwise as mw

STEPS = 2  # of accumulation


def batches(samples: int = 11) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(samples, 6, generator=generator, dtype=torch.float64)
    return DataLoader(TensorDataset(x, (x.sum(1) > 0).long()), batch_size=4)


def losses_of(form: str, plan: mw.Plan | None = None) -> list[float]:
    """What a loop in this form reads: the last batch has 3 samples. Nothing but `plain` may change them."""
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2)).double()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled="off" not in form)
    model, optimizer, loader = mw.distribute(
        model, torch.optim.SGD(model.parameters(), 0.0), batches(), plan=plan, view="rank"
    )
    seen = []
    for number, (x, y) in enumerate(loader):
        loss = nn.functional.cross_entropy(model(x), y)
        kept = "accumulated" in form and number % STEPS == 0
        if "divided" in form:
            loss = loss / STEPS
        scaled = scaler.scale(loss) if "scaled" in form else loss
        weight = float(len(x)) if "weighed" in form else None
        with mw.accumulate() if kept else contextlib.nullcontext():
            loss = mw.backward(scaled, weight)
        seen.append(loss.item() * (STEPS if "divided" in form else 1))
        if kept:
            continue
        if "scaled" in form:
            scaler.step(optimizer)
            scaler.update()
        else:
            optimizer.step()
        optimizer.zero_grad()
    return seen


def plain() -> list[float]:
    """The same losses without meshwise: nothing is learned."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2)).double()
    return [nn.functional.cross_entropy(model(x), y).item() for x, y in batches()]


FORMS = [
    "plain",
    "scaled",
    "scaled off",
    "divided",
    "accumulated",
    "scaled, divided, accumulated",
    "scaled and weighed",
    "weighed, divided, accumulated",
]


@pytest.mark.parametrize("form", FORMS)
def test_the_loss_that_comes_back_is_that_of_plain_torch(form: str) -> None:
    assert losses_of(form) == pytest.approx(plain(), rel=1e-12)


@pytest.mark.parametrize("plan", [mw.Plan(data=2), mw.Plan(shard=2)], ids=str)
def test_the_loss_that_comes_back_is_that_of_one_device(plan: mw.Plan, pool: Any) -> None:
    def case(plan: mw.Plan) -> dict[str, list[float]]:
        found = {}
        for form in FORMS:
            with mw.session():
                found[form] = losses_of(form, plan)
        return found

    for found in pool(2).run(case, plan):
        for form in FORMS:
            assert found[form] == pytest.approx(plain(), rel=1e-12), form
