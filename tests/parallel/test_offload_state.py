"""Offload of parameters and of the optimizer's state: the numbers of one device, and where things lie."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from meshwise.parallel import offload_state
from meshwise.parallel.apply import apply, bind
from meshwise.parallel.deferred import deferred
from meshwise.parallel.offload_state import OffloadedState
from meshwise.spec.errors import PlanError
from meshwise.spec.plan import Plan
from meshwise.spec.world import World
from meshwise.transfer import collectives
from tests.parallel.applied import backward
from tests.parallel.zoo import ZOO, batches, build

OPTIMIZERS: dict[str, Any] = {
    "adamw": lambda ps: torch.optim.AdamW(ps, lr=1e-2, amsgrad=True),
    "sgd": lambda ps: torch.optim.SGD(ps, lr=1e-2, momentum=0.9, nesterov=True),
    "adagrad": lambda ps: torch.optim.Adagrad(ps, lr=1e-2),
    "rmsprop": lambda ps: torch.optim.RMSprop(ps, lr=1e-3, momentum=0.5, centered=True),
    "nadam": lambda ps: torch.optim.NAdam(ps, lr=1e-2),
    "adafactor": lambda ps: torch.optim.Adafactor(ps, lr=1e-2),
    "counting": lambda ps: Counting(ps, lr=1e-2),
}


class Counting(torch.optim.SGD):
    """Counts its steps in its groups, as some optimizers do, and calls its parent's step."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["steps"] = group.get("steps", 0) + 1
            group["weight_decay"] = 0.1 / group["steps"]
        return super().step(closure)


@dataclass
class Traffic:
    """Bytes of state that went to the host and came back, and the most that came and had not gone again."""

    out: int = 0
    back: int = 0
    here: int = 0
    most: int = 0

    def send(self, real: Callable[..., Tensor], value: Tensor) -> Tensor:
        self.out, self.here = self.out + value.nbytes, max(0, self.here - value.nbytes)  # made here: it never came
        return real(value)

    def fetch(self, real: Callable[..., Tensor], value: Tensor, parameter: Tensor) -> Tensor:
        self.back, self.here = self.back + value.nbytes, self.here + value.nbytes
        self.most = max(self.most, self.here)
        return real(value, parameter)


@pytest.fixture
def moved(monkeypatch: pytest.MonkeyPatch) -> Traffic:
    traffic = Traffic()
    for name, meter in (("_sent", traffic.send), ("_fetched", traffic.fetch)):
        monkeypatch.setattr(offload_state, name, functools.partial(meter, getattr(offload_state, name)))
    return traffic


def stepped(make: Any, bucket: int | None, steps: int = 3) -> tuple[nn.Module, Any]:
    model = build("transformer")
    optimizer = make(model.parameters())
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    if bucket is not None:
        OffloadedState(optimizer, bucket)
    for batch, target in batches("transformer", steps):
        ZOO["transformer"].score(model(batch), target).backward()
        optimizer.step()
        scheduler.step()
        assert bucket is None or all(p.grad is not None for p in model.parameters())
        optimizer.zero_grad()
    return model, optimizer


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_any_optimizer_steps_as_it_would(name: str, moved: Traffic) -> None:
    want, plain = stepped(OPTIMIZERS[name], None)
    got, optimizer = stepped(OPTIMIZERS[name], 20_000)
    for (n, p), q in zip(want.named_parameters(), got.parameters(), strict=True):
        assert torch.equal(p, q), n
    a, b = plain.state_dict(), optimizer.state_dict()
    assert a["param_groups"] == b["param_groups"] and a["state"].keys() == b["state"].keys()
    for index, entry in a["state"].items():
        for key, value in entry.items():
            same = torch.equal(value, b["state"][index][key]) if isinstance(value, torch.Tensor) else True
            assert same and key in b["state"][index]
    state = sum(v.nbytes for e in b["state"].values() for v in e.values() if isinstance(v, torch.Tensor) and v.ndim > 0)
    rounds = 3 if name == "adagrad" else 2  # most make their state on the device in the first step
    assert moved.back == rounds * state and moved.out == (rounds + 1) * state
    assert state == 0 or 0 < moved.most < state * 0.7


def test_a_state_that_is_loaded_goes_to_the_host_too(moved: Traffic) -> None:
    _, optimizer = stepped(OPTIMIZERS["adamw"], None)
    model = build("transformer")
    other = OPTIMIZERS["adamw"](model.parameters())
    OffloadedState(other)
    other.load_state_dict(optimizer.state_dict())
    assert moved.out == 3 * sum(p.nbytes for p in model.parameters())


def test_a_closure_is_refused() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    OffloadedState(optimizer)
    with pytest.raises(PlanError, match=r"optimizer\.step\(closure\) needs all of the state at once"):
        optimizer.step(lambda: 0.0)


def test_parameters_need_parts() -> None:
    with pytest.raises(PlanError, match=r"shard=1 does not divide them\. Use shard=2 or more, or offload='optimizer'"):
        apply(nn.Linear(2, 2), Plan(offload=("parameters",)), World())


def trained(plan: Plan, late: bool, clip: float | None) -> tuple[list[float], list[Any], int]:
    """Losses, parameters and the norm of the last step; and the bytes of state that moved."""
    world = World(rank=collectives.get_rank(), size=collectives.world_size())
    torch.manual_seed(0)
    if late:
        with deferred():
            model = ZOO["transformer"].make().double()
    else:
        model = ZOO["transformer"].make().double()
    applied = apply(model, plan, world)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    bind(optimizer, plan, world)
    losses, scaler = [], torch.amp.GradScaler("cpu", enabled=clip is None, init_scale=4.0)
    for batch, target in batches("transformer", 3):
        part = slice(world.rank, None, world.size)
        loss = ZOO["transformer"].score(model(batch[part]), target[part])
        mean = backward(applied, scaler.scale(loss), value=loss.detach())
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses.append(float(mean))
    whole = [p.detach().full_tensor() if isinstance(p, DTensor) else p.detach() for p in model.parameters()]
    return losses, whole, sum(v.device.type != "cpu" for e in optimizer.state.values() for v in e.values())


PLANS = [
    Plan(shard=2, offload=("parameters",)),
    Plan(shard=2, offload=("optimizer",)),
    Plan(data=2, offload=("optimizer",)),
    Plan(data=2, zero1=True, offload=("optimizer",)),
    Plan(shard=2, offload=("optimizer", "parameters", "activations"), recompute="full"),
]


@pytest.mark.parametrize(
    ("plan", "clip"),
    [
        pytest.param(plan, clip, marks=[pytest.mark.slow] * ((number % 2 == 0) == (clip is None)))
        for number, plan in enumerate(PLANS)
        for clip in (None, 0.1)
    ],
    ids=repr,
)
def test_steps_are_those_of_one_device(plan: Plan, clip: float | None, pool: Any) -> None:
    losses, parameters, _ = trained(Plan(), False, clip)
    for got, found, elsewhere in pool(2).run(trained, plan, plan.shard > 1, clip):
        assert got == pytest.approx(losses, abs=1e-9) and elsewhere == 0
        assert all((a - b).abs().max() < 1e-9 for a, b in zip(found, parameters, strict=True))
