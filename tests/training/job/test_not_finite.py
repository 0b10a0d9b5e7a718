"""Steps with gradients that are not finite are skipped, and leave nothing behind."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from meshwise.spec.errors import LossError
from meshwise.training.job.not_finite import MOST_IN_A_ROW, NotFinite
from meshwise.training.recovery.state import RunState


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))


def skips(model: nn.Module, said: list[str]) -> NotFinite:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = RunState(model, optimizer, None, torch.amp.GradScaler("cpu", enabled=False), seed=0)
    return NotFinite("skip", state, None, said.append, scaled=False)


def step(model: nn.Module, skipped: NotFinite, value: float, number: int = 1) -> bool:
    skipped.step_begins()
    model.zero_grad()
    x = torch.randn(5, 4)
    x[0, 0] = value
    model(x).pow(2).sum().backward()
    return skipped.skips(number, [(torch.tensor(1.0), 1.0)])


def test_a_finite_step_is_taken(model: nn.Module) -> None:
    said: list[str] = []
    assert step(model, skips(model, said), 1.0) is False
    assert not said and model[1].num_batches_tracked == 1


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_buffers_are_as_before_a_step_that_is_skipped(value: float, model: nn.Module) -> None:
    said: list[str] = []
    skipped = skips(model, said)
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    assert step(model, skipped, value, 40) is True
    assert all(torch.equal(buffer, before[name]) for name, buffer in model.named_buffers())
    assert said == ["step 40 is skipped: its gradients are not finite."]
    assert skipped.note().startswith("1 step skipped")
    assert step(model, skipped, 1.0, 41) is False


def test_a_run_whose_every_step_is_skipped_ends(model: nn.Module) -> None:
    said: list[str] = []
    skipped = skips(model, said)
    with pytest.raises(LossError, match="20 batches in a row"):
        for number in range(MOST_IN_A_ROW + 1):
            step(model, skipped, math.nan, number)
    assert len(said) == 1 and skipped.count == MOST_IN_A_ROW + 1
