"""A plan that needs less memory computes the same numbers: what may be halved, and what runs again instead."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from meshwise.spec.plan import Plan
from meshwise.spec.world import World
from meshwise.training.process.explain import explain_in_script, may_draw, smaller_plan

TWO, ONE, GPU = World(size=2, device="cpu"), World(size=1, device="cpu"), World(size=1, device="cuda")


class Hidden(nn.Module):
    """Draws without a module for it."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(x, 0.1)


class Plain(nn.Module):
    """Adds one."""

    def forward(self, x: Tensor) -> Tensor:
        return x + 1


@pytest.mark.parametrize(
    ("model", "draws"),
    [
        (lambda: nn.Linear(2, 2), False),
        (Plain, False),
        (Hidden, True),
        (lambda: nn.Dropout(0.1), True),
        (lambda: nn.Dropout(0.0), False),
        (lambda: nn.TransformerEncoderLayer(4, 2, 8), True),
        (lambda: nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0), False),
        (lambda: nn.LSTM(4, 4, num_layers=2, dropout=0.5), True),
    ],
)
def test_what_draws_random_numbers_is_known_by_its_code(model: Callable[[], nn.Module], draws: bool) -> None:
    assert may_draw(model()) == draws


@pytest.mark.parametrize(
    ("plan", "model", "rows", "world", "changes"),
    [
        (Plan(data=2), nn.Linear(2, 2), 8, TWO, {"accumulate": 2}),
        (Plan(data=2, accumulate=4), nn.Linear(2, 2), 16, TWO, {"accumulate": 8}),
        (Plan(data=2, accumulate=4), nn.Linear(2, 2), 8, TWO, {"recompute": "full"}),  # a sample a microbatch
        (Plan(data=2), nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)), 8, TWO, {"recompute": "full"}),
        (Plan(data=2), nn.Dropout(0.1), 8, TWO, {"recompute": "full"}),
        (Plan(), nn.Linear(2, 2), 8, ONE, {"recompute": "full"}),  # a loss that nobody has divided yet
        (Plan(recompute="full"), nn.Linear(2, 2), 8, ONE, None),
        (Plan(recompute="full"), nn.Linear(2, 2), 8, GPU, {"offload": ("activations",)}),
    ],
)
def test_what_needs_less_and_keeps_the_numbers(
    plan: Plan, model: nn.Module, rows: int, world: World, changes: dict[str, object] | None
) -> None:
    found = smaller_plan(plan, model, rows, world, apart=True)
    if changes is None:
        assert found is None
        return
    assert found is not None
    fewer, text = found
    assert {name: getattr(fewer, name) for name in changes} == changes
    unknown = smaller_plan(plan, model, rows, world)  # a loss over pairs of samples would be another one
    assert unknown is not None and unknown[0].accumulate == plan.accumulate
    assert text.startswith(next(iter(changes)))


@pytest.mark.parametrize(
    ("plan", "advice"),
    [
        (
            Plan(data=2),
            "recompute=full: blocks run again in the backward. Write meshwise run --set data=2 --set recompute",
        ),
        (Plan(data=2, recompute="full"), "Write meshwise run --set shard=2 --set recompute=full."),
        (Plan(shard=2, recompute="full"), "Use smaller batches and accumulate (mw.accumulate), or more devices."),
    ],
)
def test_a_loop_of_ones_own_is_told_which_plan_needs_less(plan: Plan, advice: str) -> None:
    error = torch.OutOfMemoryError("no memory")
    explain_in_script(error, TWO, plan, [nn.Linear(2, 2)])
    (note,) = error.__notes__
    assert note.startswith("out of memory on cpu: allocated ") and advice in note
    other = ValueError("no memory of it")
    explain_in_script(other, TWO, plan, [nn.Linear(2, 2)])
    assert not hasattr(other, "__notes__")
