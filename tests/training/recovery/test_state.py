"""The state of a run goes through its saved form unchanged, and into no other model or optimizer."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import (
    ConstantLR,
    ExponentialLR,
    LambdaLR,
    LRScheduler,
    MultiStepLR,
    OneCycleLR,
    SequentialLR,
)

from meshwise.spec.errors import CheckpointError
from meshwise.training.recovery.state import RunState, pack, unpack

SCHEDULERS: dict[str, Callable[[Optimizer], LRScheduler]] = {
    "multistep": lambda optimizer: MultiStepLR(optimizer, [2, 4], 0.1),
    "onecycle": lambda optimizer: OneCycleLR(optimizer, 0.1, total_steps=20),
    "lambda": lambda optimizer: LambdaLR(optimizer, lambda step: 1 / (step + 1)),
    "sequential": lambda optimizer: SequentialLR(
        optimizer, [ConstantLR(optimizer, 0.1), ExponentialLR(optimizer, 0.9)], [3]
    ),
}


def make(
    optimizer: Callable[..., Optimizer] = Adam,
    scheduler: Callable[[Optimizer], LRScheduler] | None = None,
    model: nn.Module | None = None,
    *,
    scaled: bool = False,
) -> RunState:
    model = model or nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    made = optimizer(model.parameters(), lr=0.05)
    scaler = torch.amp.GradScaler("cpu", enabled=scaled, init_scale=8.0, growth_interval=2)
    return RunState(model, made, scheduler(made) if scheduler else None, scaler, seed=3)


def train(state: RunState, steps: int) -> list[float]:
    """Steps on data that the state's counter decides."""
    losses = []
    for _ in range(steps):
        x = torch.randn(5, 3, generator=torch.Generator().manual_seed(state.step))
        loss = state.model(x).square().mean()
        state.optimizer.zero_grad()
        state.scaler.scale(loss).backward()
        state.scaler.step(state.optimizer)
        state.scaler.update()
        if state.scheduler is not None:
            state.scheduler.step()
        state.step += 1
        losses.append(loss.item())
    return losses


def through_a_file(saved: dict[str, Any]) -> Any:
    file = io.BytesIO()
    torch.save(saved, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("optimizer", [Adam, AdamW, SGD])
@pytest.mark.parametrize("scheduler", [None, *SCHEDULERS])
def test_a_resumed_state_goes_on_as_the_whole_run_did(
    optimizer: type[Optimizer], scheduler: str | None, scaled: bool
) -> None:
    make_scheduler = SCHEDULERS[scheduler] if scheduler else None
    whole = make(optimizer, make_scheduler, scaled=scaled)
    train(whole, 5)
    whole.epoch, whole.index = 2, 40
    saved = through_a_file(pack(whole))
    expected = train(whole, 5)
    again = make(optimizer, make_scheduler, scaled=scaled)
    unpack(again, saved)
    assert (again.seed, again.epoch, again.index, again.step) == (3, 2, 40, 5)
    assert train(again, 5) == expected
    assert again.scaler.state_dict() == whole.scaler.state_dict()


def sequence(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(*layers)


@pytest.mark.parametrize(
    ("there", "here", "says"),
    [
        (sequence(nn.Linear(3, 4)), sequence(nn.Linear(3, 5)), "0.weight has shape (4, 3) in it and (5, 3) in this"),
        (
            sequence(nn.Linear(3, 3)),
            sequence(nn.Linear(3, 3), nn.Linear(3, 3)),
            "1.weight has shape none in it and (3, 3) in this",
        ),
        (
            sequence(nn.Linear(3, 3), nn.Linear(3, 3)),
            sequence(nn.Linear(3, 3)),
            "(1.weight, 1.bias differ)",
        ),
        (
            sequence(nn.Linear(1, 1), nn.BatchNorm1d(1, affine=False)),
            sequence(nn.Linear(1, 1)),
            "(1.running_mean, 1.running_var, 1.num_batches_tracked differ)",
        ),
        (
            sequence(*(nn.Linear(1, 1) for _ in range(4))),
            sequence(nn.Linear(1, 1)),
            "1.weight, 1.bias, 2.weight and 3 more",
        ),
    ],
)
def test_a_state_of_another_model_is_told_and_changes_nothing(there: nn.Module, here: nn.Module, says: str) -> None:
    state = make(model=here)
    before = {name: tensor.clone() for name, tensor in here.state_dict().items()}
    with pytest.raises(CheckpointError) as caught:
        unpack(state, pack(make(model=there)))
    assert "belongs to another model" in str(caught.value) and says in str(caught.value)
    assert "\n" not in str(caught.value)
    assert all(tensor.equal(before[name]) for name, tensor in here.state_dict().items())


@pytest.mark.parametrize(("there", "here"), [(Adam, SGD), (SGD, Adam), (Adam, AdamW)])
def test_a_state_of_another_optimizer_is_told(there: type[Optimizer], here: type[Optimizer]) -> None:
    saved, state = make(there), make(here)
    with pytest.raises(CheckpointError) as caught:
        unpack(state, pack(saved))
    said = f"belongs to another optimizer: it was saved with {there.__name__}, but this program uses {here.__name__}."
    assert said in str(caught.value)


def test_a_state_of_other_parameter_groups_is_told() -> None:
    def grouped(parameters: Any, lr: float) -> Optimizer:
        first, *rest = parameters
        return Adam([{"params": [first]}, {"params": rest}], lr=lr)

    with pytest.raises(CheckpointError, match="belongs to another optimizer"):
        unpack(make(Adam), pack(make(grouped)))


def test_a_scheduler_that_the_job_has_gained_starts_anew() -> None:
    saved, state = make(), make(scheduler=SCHEDULERS["multistep"])
    train(saved, 3)
    unpack(state, pack(saved))
    assert state.scheduler is not None and state.scheduler.last_epoch == 0
    assert state.step == 3
