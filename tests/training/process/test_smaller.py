"""A plan that needs less memory computes the same numbers."""

from __future__ import annotations

import pytest
import torch

from meshwise.reports.recorder import Recorder
from meshwise.spec.plan import Plan
from meshwise.spec.world import World
from meshwise.training.process.explain import explain_in_script, smaller_plan

TWO, ONE, GPU = World(size=2, device="cpu"), World(size=1, device="cpu"), World(size=1, device="cuda")


@pytest.mark.parametrize(
    ("plan", "world", "changes"),
    [
        (Plan(data=2), TWO, {"recompute": "full"}),
        (Plan(recompute="full"), ONE, None),
        (Plan(recompute="full"), GPU, {"offload": ("activations",)}),
    ],
)
def test_what_needs_less_and_keeps_the_numbers(plan: Plan, world: World, changes: dict[str, object] | None) -> None:
    found = smaller_plan(plan, world)
    if changes is None:
        assert found is None
        return
    assert found is not None
    fewer, text = found
    assert {name: getattr(fewer, name) for name in changes} == changes
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
def test_a_loop_of_ones_own_is_told_which_plan_needs_less(
    plan: Plan, advice: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("meshwise.training.process.explain.current", lambda: Recorder(on=False))
    error = torch.OutOfMemoryError("no memory")
    explain_in_script(error, TWO, plan)
    (note,) = error.__notes__
    assert note.startswith("out of memory on cpu: allocated ") and advice in note
    other = ValueError("no memory of it")
    explain_in_script(other, TWO, plan)
    assert not hasattr(other, "__notes__")
