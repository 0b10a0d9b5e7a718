"""ZeRO-1: the optimizer's state is divided, and the optimizer is the user's own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from meshwise.parallel.zero1 import DividedOptimizer, owners
from meshwise.spec.errors import PlanError
from meshwise.spec.plan import Plan
from meshwise.spec.world import World
from meshwise.transfer import collectives
from meshwise.transfer.comm_log import comm_log
from tests.parallel.applied import apply_with, backward
from tests.parallel.zoo import ZOO, batches, build


def here() -> World:
    return World(rank=collectives.get_rank(), size=collectives.world_size())


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    return sum(v.nbytes for entry in optimizer.state.values() for v in entry.values() if isinstance(v, Tensor))


def divided(name: str, size: int) -> tuple[int, int, bool]:
    """Bytes of state of this rank and of one device, and whether gradients and `zero_grad` are as ever."""
    model = build(name)
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad])
    same = optimizer
    applied = apply_with(model, Plan(data=size, zero1=True), here(), optimizer)
    (batch, target), *_ = batches(name, 1)
    backward(applied, ZOO[name].score(model(batch), target))
    reached = [p.grad for p in model.parameters()]
    optimizer.step()
    kept = all(p.grad is g for p, g in zip(model.parameters(), reached, strict=True))
    optimizer.zero_grad()
    kept &= all(p.grad is None for p in model.parameters()) and optimizer is same
    alone = build(name)
    plain = torch.optim.Adam(alone.parameters())
    ZOO[name].score(alone(batch), target).backward()
    plain.step()
    return state_bytes(optimizer), state_bytes(plain), kept


@pytest.mark.parametrize("size", [2, 4])
def test_a_rank_holds_its_part_of_the_state(size: int, pool: Any) -> None:
    results = pool(size).run(divided, "transformer", size)
    largest = 2 * max(p.nbytes for p in build("transformer").parameters())
    whole = results[0][1]
    assert sum(held for held, _, _ in results) == whole
    assert all(held <= whole / size + largest and kept for held, _, kept in results)
    assert max(held for held, _, _ in results) < 1.2 * whole / size


def with_state() -> list[int]:
    """An optimizer that has stepped before goes on with its state; each rank keeps its part."""
    model, alone = build("mlp"), build("mlp")
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (model, alone)]
    data = batches("mlp", 3)
    for m, optimizer in zip((model, alone), optimizers, strict=True):
        ZOO["mlp"].score(m(data[0][0]), data[0][1]).backward()
        optimizer.step()
        optimizer.zero_grad()
    applied = apply_with(model, Plan(data=2, zero1=True), here(), optimizers[0])
    for batch, target in data[1:]:
        backward(applied, ZOO["mlp"].score(model(batch), target))
        ZOO["mlp"].score(alone(batch), target).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for a, b in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)
    return [state_bytes(optimizer) for optimizer in optimizers]


def test_state_that_was_there_is_divided_too(pool: Any) -> None:
    (first, whole), (second, _) = pool(2).run(with_state)
    assert first + second == whole and min(first, second) > 0


def test_the_largest_go_to_who_has_least() -> None:
    parameters = [nn.Parameter(torch.zeros(n)) for n in (1, 5, 3, 4, 2)]
    assert [[p.numel() for p in held] for held in owners(parameters, 2)] == [[5, 2, 1], [4, 3]]


def test_what_steps_all_parameters_as_one_is_refused() -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(PlanError, match="LBFGS steps all of them as one"):
        DividedOptimizer(torch.optim.LBFGS(model.parameters()), 0, 2)
    optimizer = torch.optim.SGD(model.parameters())
    DividedOptimizer(optimizer, 0, 1)
    with pytest.raises(PlanError, match=r"zero1 does not support optimizer.step\(closure\)"):
        optimizer.step(lambda: 0.0)
    optimizer.step()


class CallsItsParent(torch.optim.SGD):
    """torch puts hooks around this step, and around the parent's as soon as a plain SGD is made."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


class RaisesOnce(CallsItsParent):
    """Raises in the middle of its first step: its parent has stepped, it has not."""

    raised = True  # not while it is tried

    def step(self, closure: Any = None) -> Any:
        result = super().step(closure)
        if not self.raised:
            self.raised = True
            raise RuntimeError("in the middle")
        return result


def steps_of(kind: type[torch.optim.SGD]) -> tuple[list[bool], int, list[Tensor]]:
    """Which parameters have their gradient after each step, how many broadcasts a step makes, and the parameters."""
    model = build("mlp")
    torch.optim.SGD(model.parameters())
    optimizer = kind(model.parameters(), lr=0.1, momentum=0.9)
    applied = apply_with(model, Plan(data=2, zero1=True), here(), optimizer)
    optimizer.raised = False  # type: ignore[attr-defined]
    kept, sent = [], 0
    for batch, target in batches("mlp", 3):
        backward(applied, ZOO["mlp"].score(model(batch), target))
        gradients = [p.grad for p in model.parameters()]
        if kind is RaisesOnce and not kept:
            with pytest.raises(RuntimeError, match="in the middle"):
                optimizer.step()
            kept += [p.grad is g for p, g in zip(model.parameters(), gradients, strict=True)]
        with comm_log() as log:
            optimizer.step()
        sent = len([moved for moved in log if moved.operation == "broadcast"])
        kept += [p.grad is g for p, g in zip(model.parameters(), gradients, strict=True)]
        optimizer.zero_grad()
    return kept, sent, [p.detach() for p in model.parameters()]


def test_a_step_that_calls_its_parents_is_one_step(pool: Any) -> None:
    plain, nested = pool(2).run(steps_of, torch.optim.SGD), pool(2).run(steps_of, CallsItsParent)
    for (kept, sent, parameters), (kept_too, sent_too, same) in zip(plain, nested, strict=True):
        assert all(kept) and all(kept_too) and sent == sent_too > 0
        assert all(torch.equal(a, b) for a, b in zip(parameters, same, strict=True))


def test_a_step_that_raises_gives_the_gradients_back(pool: Any) -> None:
    for kept, sent, parameters in pool(2).run(steps_of, RaisesOnce):
        assert all(kept) and sent > 0
        assert all(p.isfinite().all() for p in parameters)


def averaged() -> list[Tensor]:
    """A moving average, taken by hooks of the program's own around the step."""
    model = build("mlp")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    average = [torch.zeros_like(p) for p in model.parameters()]
    norms: list[Tensor] = []

    def note_norm(*_: Any) -> None:
        norms.append(nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None]))

    def average_in(*_: Any) -> None:
        for mean, p in zip(average, model.parameters(), strict=True):
            mean.lerp_(p.detach(), 0.5)

    optimizer.register_step_post_hook(average_in)
    applied = apply_with(model, Plan(data=2, zero1=True), here(), optimizer)
    optimizer.register_step_pre_hook(note_norm)
    for batch, target in batches("mlp", 2):
        backward(applied, ZOO["mlp"].score(model(batch), target))
        optimizer.step()
        optimizer.zero_grad()
    return [*average, *norms]


def test_hooks_of_the_program_see_all_gradients_and_all_new_parameters(pool: Any) -> None:
    first, second = pool(2).run(averaged)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
