"""An optimizer is tried before a plan divides it: what would make another step is refused, without a wrong number.

Tests parallel/shard_refusals.py too.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

from meshwise.parallel.offload_state import OffloadedState
from meshwise.parallel.probe_optimizer import unlike_by_parameters
from meshwise.parallel.shard_refusals import check_steps_on_parts
from meshwise.parallel.zero1 import DividedOptimizer
from meshwise.planner.trace import trace
from meshwise.spec.errors import PlanError
from meshwise.spec.plan import Plan
from meshwise.torch_compat.fake import FakeTensors
from meshwise.training.job.job import Job
from tests.parallel.applied import apply_with, backward
from tests.parallel.test_zero1 import here


class Stepping(Optimizer):
    """Subclasses say what is subtracted from a parameter."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        held = [(p, p.grad) for group in self.param_groups for p in group["params"] if p.grad is not None]
        for p, gradient in held:
            p.sub_(self.update(p, gradient, [g for _, g in held]), alpha=self.param_groups[0]["lr"])

    def update(self, p: Tensor, gradient: Tensor, every: list[Tensor]) -> Tensor:
        raise NotImplementedError


class Lars(Stepping):
    def update(self, p: Tensor, gradient: Tensor, every: list[Tensor]) -> Tensor:
        return gradient * (p.norm() / gradient.norm())


class ClippedTogether(Stepping):
    def update(self, p: Tensor, gradient: Tensor, every: list[Tensor]) -> Tensor:
        return gradient / torch.stack([g.norm() for g in every]).norm().clamp(min=1)


class ClippedTogetherLater(ClippedTogether):
    """As Shampoos, which wait for `start_step`."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, lr)
        self.start_step, self.count = 25, 0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.count += 1
        super().step()

    def update(self, p: Tensor, gradient: Tensor, every: list[Tensor]) -> Tensor:
        return super().update(p, gradient, every if self.count > self.start_step else [gradient])


class Noisy(Stepping):
    def update(self, p: Tensor, gradient: Tensor, every: list[Tensor]) -> Tensor:
        return gradient + torch.randn_like(gradient) * random.random()


class Raising(Stepping):
    def update(self, p: Tensor, gradient: Tensor, every: list[Tensor]) -> Tensor:
        raise KeyError("ema")


class RowsOfItsOwn(Stepping):
    """Reads this rank's part as if it were all."""

    def update(self, p: Tensor, gradient: Tensor, every: list[Tensor]) -> Tensor:
        local: Tensor = getattr(gradient, "_local_tensor", gradient)
        return gradient / local.norm().item()


class ScheduleFree(Stepping):
    """Trains on other values than it evaluates with, which lie in its state."""

    def update(self, p: Tensor, gradient: Tensor, every: list[Tensor]) -> Tensor:
        self.state[p].setdefault("mean", p.clone()).lerp_(p - gradient, 0.1)
        return gradient

    @torch.no_grad()
    def eval(self) -> None:
        for p, entry in self.state.items():
            p.lerp_(entry["mean"], 0.5)

    def train(self) -> None:
        pass


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()


BY_PARAMETERS: dict[Any, str] = {
    torch.optim.AdamW: "",
    torch.optim.Adafactor: "",
    torch.optim.Rprop: "",
    Lars: "",
    ScheduleFree: "",
    ClippedTogether: "its results differ by",
    ClippedTogetherLater: "its results differ by",
    Noisy: "its results differ by",
    Raising: "a trial on small matrices raised KeyError('ema')",
}


class SignOfMean(Stepping):
    """As Lion: each number by itself."""

    def update(self, p: Tensor, gradient: Tensor, every: list[Tensor]) -> Tensor:
        return self.state[p].setdefault("mean", torch.zeros_like(p)).lerp_(gradient, 0.1).sign()


def of_fakes(kind: Any) -> str:
    with FakeTensors(lambda f, args, kwargs, run: run(), stands_for_real=True):
        return unlike_by_parameters(kind(model().parameters()))


@pytest.mark.parametrize("kind", BY_PARAMETERS)
def test_a_rehearsal_knows_the_same_of_an_optimizer(kind: Any) -> None:
    found = of_fakes(kind)
    assert bool(found) == bool(BY_PARAMETERS[kind]) and BY_PARAMETERS[kind] in found


def rehearsed_under_shard(kind: Any) -> None:
    rows = torch.zeros(8, 6).double(), torch.zeros(8, 3).double()
    trace(Job("own", model, lambda m, batch: F.mse_loss(m(batch[0]), batch[1]), kind, lambda: rows, 4), Plan(shard=2))


def test_an_optimizer_of_the_programs_own_is_rehearsed_under_shard() -> None:
    rehearsed_under_shard(SignOfMean)
    with pytest.raises(PlanError, match=r"ClippedTogether may compute different values .* its results differ by"):
        rehearsed_under_shard(ClippedTogether)


@pytest.mark.parametrize("kind", BY_PARAMETERS)
def test_an_optimizer_that_steps_parameters_together_is_known(kind: Any) -> None:
    m = model()
    optimizer = kind(m.parameters())
    before = torch.get_rng_state(), [p.clone() for p in m.parameters()]
    found = unlike_by_parameters(optimizer)
    assert bool(found) == bool(BY_PARAMETERS[kind]) and BY_PARAMETERS[kind] in found
    assert torch.equal(before[0], torch.get_rng_state())
    assert not optimizer.state and all(torch.equal(a, b) for a, b in zip(before[1], m.parameters(), strict=True))


def test_it_is_refused_where_parameters_are_stepped_some_at_a_time() -> None:
    together = ClippedTogether(model().parameters())
    with pytest.raises(PlanError, match=r"zero1: .* ClippedTogether may then compute different values.*Use data"):
        DividedOptimizer(together, 0, 2)
    with pytest.raises(
        PlanError,
        match="offload='optimizer' updates parameters in groups, and ClippedTogether may then compute different",
    ):
        OffloadedState(together)


def test_an_optimizer_around_another_that_torch_does_not_know_is_refused() -> None:
    around: Any = object.__new__(Lars)
    around.param_groups = torch.optim.SGD(model().parameters()).param_groups
    with pytest.raises(PlanError, match="cannot divide Lars, because it wraps another optimizer"):
        DividedOptimizer(around, 0, 2)


def under_shard() -> dict[str, str]:
    """What is said of each optimizer of a model that is sharded."""
    m = model()
    apply_with(m, Plan(shard=2), here())
    said = {}
    for kind in (torch.optim.AdamW, Lars, ClippedTogether, RowsOfItsOwn, torch.optim.Muon, torch.optim.Rprop):
        held = [p for p in m.parameters() if p.ndim == 2]
        try:
            check_steps_on_parts(kind(held))
            said[kind.__name__] = ""
        except PlanError as error:
            said[kind.__name__] = str(error)
    return said


def test_under_shard_what_steps_on_parts_otherwise_is_refused(pool: Any) -> None:
    said, other = pool(2).run(under_shard)
    assert said == other
    assert said["AdamW"] == said["Lars"] == said["ClippedTogether"] == ""  # the norm of a part is that of the whole
    for name in ("Muon", "RowsOfItsOwn"):
        assert said[name].startswith(f"shard: {name} may compute different values if each rank has only a part")
        assert "its results differ by" in said[name] and said[name].endswith("such as --set zero1=true.")
    # Before torch 2.15 its operators did not know DTensors.
    assert said["Rprop"] == "" or "a trial on small matrices raised" in said["Rprop"]


def schedule_free() -> list[Tensor]:
    m = model()
    optimizer = ScheduleFree(m.parameters())
    applied = apply_with(m, Plan(data=2, zero1=True), here(), optimizer)
    for _ in range(3):
        backward(applied, m(torch.ones(4, 6).double()).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    optimizer.eval()
    return [p.detach() for p in m.parameters()]


def test_parameters_of_a_schedule_free_optimizer_are_alike_on_all_ranks_in_evaluation_too(pool: Any) -> None:
    m = model()
    optimizer = ScheduleFree(m.parameters())
    for _ in range(3):
        m(torch.ones(4, 6).double()).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.eval()
    for ranks in pool(2).run(schedule_free):
        torch.testing.assert_close(ranks, [p.detach() for p in m.parameters()], rtol=0, atol=1e-12)
