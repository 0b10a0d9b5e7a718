"""Parameters that the forward itself writes (BYOL, MoCo, codebooks as running averages): right, or refused by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import meshwise as mw
from meshwise.spec.plan import Plan
from meshwise.training.job.loop import run_job
from meshwise.training.job.options import RunOptions
from meshwise.training.process.session import end_sessions
from tests.pool import CaseFailed

RATE, STAGES = 0.1, Plan(pipeline=2, accumulate=2)
Write = Callable[[Tensor, Tensor], object]


class Momentum(nn.Module):
    """A network beside its running average, which its own forward makes from the call of number `begin` on."""

    def __init__(self, write: Write | None = None, begin: int = 1) -> None:
        super().__init__()
        self.online, self.target = nn.Linear(6, 9), nn.Linear(6, 9)
        self.write, self.calls, self.begin = write, 0, begin
        self.target.requires_grad_(False)

    def average(self, write: Write) -> None:
        with torch.no_grad():
            for p, q in zip(self.target.parameters(), self.online.parameters(), strict=True):
                write(p, q)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.write is not None and self.training and self.calls >= self.begin:
            self.average(self.write)
        found: Tensor = (self.online(x) - self.target(x)).square().mean()
        return found


def lerp(p: Tensor, q: Tensor) -> object:
    return p.lerp_(q, RATE)


def lerp_data(p: Tensor, q: Tensor) -> object:
    return p.data.lerp_(q.data, RATE)


def lerp_detached(p: Tensor, q: Tensor) -> object:
    return p.detach().mul_(1 - RATE).add_(q, alpha=RATE)


def lerp_each(p: Tensor, q: Tensor) -> object:
    return torch._foreach_lerp_([p], [q], RATE)  # type: ignore[func-returns-value]


def copy(p: Tensor, q: Tensor) -> object:
    return p.copy_(p * (1 - RATE) + q * RATE)


def same_again(p: Tensor, q: Tensor) -> object:
    return p.clamp_(-9, 9), p.data.copy_(p)


def trained(
    plan: Plan | None, write: Write | None, begin: int = 1, behind: Write | None = None, epochs: int = 2
) -> Any:
    """Losses and the weights of both networks. behind: writes in the loop, behind the step."""
    end_sessions()
    torch.manual_seed(0)
    model = Momentum(write, begin).double()
    optimizer = torch.optim.SGD(model.online.parameters(), 0.1)
    loader: Any = torch.utils.data.DataLoader(torch.randn(24, 6, dtype=torch.float64), batch_size=4)
    model, optimizer, loader = mw.distribute(model, optimizer, loader, plan=plan, view="rank")
    losses = []
    for _ in range(epochs):
        for x in loader:
            losses.append(float(mw.backward(model(x))))
            optimizer.step()
            optimizer.zero_grad()
            if behind is not None:
                model.average(behind)
    weights = {name: torch.tensor(p.tolist(), dtype=torch.float64) for name, p in model.state_dict().items()}
    end_sessions()
    return losses, weights


def assert_equal(found: Any, want: Any) -> None:
    assert found[0] == pytest.approx(want[0], rel=1e-9)
    for name, value in want[1].items():
        assert torch.allclose(found[1][name], value, rtol=0, atol=1e-12), name


@pytest.mark.parametrize("write", [lerp, lerp_data, lerp_detached, lerp_each, copy], ids=lambda write: write.__name__)
def test_a_forward_that_writes_sharded_parameters_is_refused_by_name(write: Write, pool: Any) -> None:
    with pytest.raises(CaseFailed, match=r"forward of Momentum changes its parameter target\.weight"):
        pool(2).run(trained, Plan(shard=2), write)


def test_a_write_that_begins_late_is_refused(pool: Any) -> None:
    with pytest.raises(CaseFailed, match=r"write a running average in the loop after optimizer\.step\(\)"):
        pool(2).run(trained, Plan(shard=2), lerp, 5)


@pytest.mark.parametrize("plan", [Plan(shard=2), Plan(data=2), Plan(shard=2, offload=("parameters",))], ids=repr)
def test_a_write_that_changes_nothing_and_one_behind_the_step_are_right(plan: Plan, pool: Any) -> None:
    want = trained(None, same_again, 1, lerp)
    for found in pool(2).run(trained, plan, same_again, 1, lerp):
        assert_equal(found, want)


@pytest.mark.parametrize("plan", [Plan(data=2), Plan(data=2, zero1=True)], ids=repr)
@pytest.mark.parametrize("write", [lerp, lerp_data, lerp_each], ids=lambda write: write.__name__)
def test_where_the_forward_has_the_parameters_its_writes_are_those_of_one_device(
    plan: Plan, write: Write, pool: Any
) -> None:
    want = trained(None, write)
    for found in pool(2).run(trained, plan, write):
        assert_equal(found, want)


class Layer(Momentum):
    """Gives hidden states, of its own network less those of the average; with a `teacher`, no gradient goes through
    the average."""

    def __init__(self, write: Write, teacher: bool) -> None:
        super().__init__(write)
        self.online, self.target, self.teacher = nn.Linear(6, 6), nn.Linear(6, 6).requires_grad_(False), teacher

    def forward(self, x: Tensor) -> Tensor:
        super().forward(x.detach())
        other = self.target(x.detach() if self.teacher else x)
        return torch.tanh(self.online(x) - other)


class Stack(nn.Module):
    """Layers that write their own averages; if `outside`, the first one's is written from outside too."""

    def __init__(self, write: Write, teacher: bool, outside: bool) -> None:
        super().__init__()
        self.layers, self.outside = nn.ModuleList(Layer(write, teacher) for _ in range(4)), outside

    def forward(self, x: Tensor) -> Tensor:
        if self.outside:
            self.layers[0].average(lerp)  # type: ignore[operator]
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def trained_job(plan: Plan, write: Write = lerp, teacher: bool = True, outside: bool = False) -> list[float]:
    job = mw.Job(
        name="averages",
        model=lambda: Stack(write, teacher, outside),
        loss=lambda model, batch: model(batch[0]),
        optimizer=lambda params: torch.optim.SGD([p for p in params if p.requires_grad], 0.1),
        data=lambda: (torch.randn(16, 3, 6, generator=torch.Generator().manual_seed(1)),),
        batch_size=8,
        epochs=2,
    )
    options = RunOptions(plan=replace(plan, precision="fp64"), log_every=1)
    losses: list[float] = run_job(job, options, None)["losses"]
    return losses


SPLIT = [Plan(tensor=2, accumulate=2), Plan(context=2, accumulate=2), STAGES]


@pytest.mark.parametrize("plan", SPLIT, ids=repr)
@pytest.mark.parametrize("write", [lerp, lerp_data], ids=lambda write: write.__name__)
def test_layers_that_write_their_own_parameters_are_those_of_one_device(plan: Plan, write: Write, pool: Any) -> None:
    want = trained_job(Plan(accumulate=2), write)
    for found in pool(2).run(trained_job, plan, write):
        assert found == pytest.approx(want, rel=1e-9)


def test_a_write_into_a_layer_of_another_stage_is_refused_in_a_sentence(pool: Any) -> None:
    with pytest.raises(
        CaseFailed,
        match=r"pipeline=2: the forward writes into a parameter \(p\.lerp_\(\.\.\.\)\) whose values only another",
    ):
        pool(2).run(trained_job, STAGES, lerp, True, True)


@pytest.mark.parametrize("write", [lerp, lerp_data], ids=lambda write: write.__name__)
def test_a_write_before_another_microbatchs_backward_is_refused_in_a_sentence(write: Write, pool: Any) -> None:
    with pytest.raises(CaseFailed, match=r"that the backward of an earlier microbatch still needs\. Write"):
        pool(2).run(trained_job, STAGES, write, False)
