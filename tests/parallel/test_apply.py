"""Techniques are joined in order; what is not built is refused (parallel/fits.py); optimizers made before go on."""

from __future__ import annotations

import functools
from dataclasses import fields, replace
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.data import Subset

from meshwise.parallel.apply import TECHNIQUES, apply
from meshwise.parallel.deferred import constructed
from meshwise.parallel.mesh import make_mesh
from meshwise.parallel.rebind import rebind
from meshwise.parallel.technique import Technique
from meshwise.spec.errors import PlanError
from meshwise.spec.plan import Plan
from meshwise.spec.world import World
from meshwise.training.job.loop import run_job
from meshwise.training.job.options import RunOptions
from meshwise.training.jobs.registry import find_job
from meshwise.transfer import collectives
from tests.parallel.applied import apply_with, backward, names_of
from tests.parallel.zoo import ZOO, batches, build


def here() -> World:
    return World(rank=collectives.get_rank(), size=collectives.world_size())


@pytest.mark.parametrize(
    ("plan", "says"),
    [
        (Plan(shard=4), "shard=4 needs 4 devices, but this run has 1. Use shard=1"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_touched(plan: Plan, says: str) -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(PlanError, match=says):
        apply(model, plan, World())
    assert type(model) is nn.Linear and not isinstance(model.weight, DTensor)


@pytest.mark.parametrize("plan", [Plan(shard=2), Plan(tensor=2), Plan(pipeline=2, accumulate=2), Plan(expert=2)])
@pytest.mark.parametrize("hook", ["register_hook", "register_post_accumulate_grad_hook"])
def test_a_hook_on_the_gradient_of_a_parameter_that_is_made_anew_is_refused(plan: Plan, hook: str) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    getattr(model[1].weight, hook)(lambda of: None)
    with pytest.raises(PlanError, match=r"1\.weight.*the hook would not run.*view_as"):
        apply(model, plan, World(size=2 // plan.within_samples))
    deferred_model, _ = constructed(functools.partial(hooked, hook))
    with pytest.raises(PlanError, match=r"weight.*the hook would not run"):
        apply(deferred_model, Plan(data=2), World(size=2))


def hooked(hook: str) -> nn.Module:
    model = nn.Linear(2, 2)
    getattr(model.weight, hook)(lambda of: None)
    return model


def losses(plan: Plan) -> list[float]:
    job = replace(find_job("gpt:tiny"), batch_size=4, epochs=1, test=None)
    job = replace(job, data=lambda: Subset(find_job("gpt:tiny").data(), range(12)))
    return run_job(job, RunOptions(plan=plan, log_every=1), folder=None)["losses"]


@pytest.mark.parametrize(
    "more",
    [
        pytest.param({"recompute": "full"}, marks=pytest.mark.slow),
        {"recompute": "selective"},
        {"offload": ("activations",)},
    ],
)
def test_a_training_loop_runs_what_needs_nothing_of_it(more: Any, pool: Any) -> None:
    want = losses(Plan(precision="fp64"))
    assert len(want) == 3
    for got in [losses(Plan(precision="fp64", **more)), *pool(2).run(losses, Plan(data=2, precision="fp64", **more))]:
        assert got == pytest.approx(want, abs=1e-9)


def test_techniques_are_where_the_table_says_and_used_by_fields_of_a_plan() -> None:
    for place, names in TECHNIQUES:
        file, _, name = place.partition(".")
        assert isinstance(getattr(import_module(f"meshwise.parallel.{file}"), name), Technique)
        assert set(names.split()) <= {field.name for field in fields(Plan)}


def mesh_facts() -> tuple[Any, ...]:
    whole = make_mesh(Plan(data=2, shard=2), here())
    line = make_mesh(Plan(shard=4), here())
    return whole.mesh_dim_names, whole.mesh.tolist(), line.mesh_dim_names, line.mesh.tolist()


def test_neighbouring_ranks_lie_on_the_innermost_axis(pool: Any) -> None:
    for facts in pool(4).run(mesh_facts):
        assert facts == (("data", "shard"), [[0, 1], [2, 3]], ("shard",), [0, 1, 2, 3])


# --- optimizers made before


def goes_on() -> tuple[int, int]:
    """An optimizer and its scheduler have stepped before sharding, and go on as on one device."""
    sides = []
    data = batches("transformer", 4)
    for shard in (True, False):
        model = build("transformer")
        groups = [
            {"params": [model.place], "lr": 0.1},
            {"params": [p for p in model.parameters() if p is not model.place]},
        ]
        optimizer = torch.optim.AdamW(groups, lr=0.01)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)

        def step(batch: Any, backward: Any, m: Any = model, o: Any = optimizer, s: Any = scheduler) -> None:
            backward(ZOO["transformer"].score(m(batch[0]), batch[1]))
            o.step()
            s.step()
            o.zero_grad()

        step(data[0], Tensor.backward)
        run: Any = Tensor.backward
        if shard:
            run = functools.partial(backward, apply_with(model, Plan(shard=2), here(), optimizer))
        for batch in data[1:]:
            step(batch, run)
        sides.append((model, optimizer))
    (ours, first), (plain, second) = sides
    for a, b in zip(ours.parameters(), plain.parameters(), strict=True):
        assert isinstance(a, DTensor)
        torch.testing.assert_close(a.full_tensor(), b.data, rtol=0, atol=1e-9)
    assert [g["lr"] for g in first.param_groups] == [g["lr"] for g in second.param_groups]
    return tuple(  # type: ignore[return-value]
        sum((v.to_local() if isinstance(v, DTensor) else v).nbytes for e in o.state.values() for v in e.values())
        for o in (first, second)
    )


def test_an_optimizer_that_has_stepped_is_rebound_with_its_state(pool: Any) -> None:
    for sharded, whole in pool(2).run(goes_on):
        assert sharded < 0.55 * whole


def test_rebinding_keeps_settings_and_leaves_counters_alone() -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.Adam([{"params": [model.weight], "lr": 0.5}, {"params": [model.bias]}], lr=0.1)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    names, steps = names_of(model), optimizer.state[model.weight]["step"]
    held = optimizer.state[model.weight]["exp_avg"]
    model.weight = nn.Parameter(torch.zeros(2, 3))
    rebind(optimizer, names, dict(model.named_parameters()))
    assert [group["lr"] for group in optimizer.param_groups] == [0.5, 0.1]
    assert optimizer.param_groups[0]["params"][0] is model.weight
    assert optimizer.state[model.weight]["exp_avg"] is held
    assert optimizer.state[model.weight]["step"] is steps and len(optimizer.state) == 2


def test_an_optimizer_of_another_model_is_told() -> None:
    model = nn.Linear(3, 2)
    other = torch.optim.SGD(nn.Linear(4, 2).parameters())
    with pytest.raises(
        PlanError, match=r"group 0 of the optimizer has a parameter of shape \(2, 4\) which is not in the model"
    ):
        apply_with(model, Plan(), World(), other)
