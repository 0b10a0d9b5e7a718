"""What torch puts around modules and their weights works under plans: pruned weights, parametrizations, checkpoints,
calls with weights that are given."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils import parametrizations, parametrize, prune
from torch.utils.checkpoint import checkpoint

import meshwise as mw
from meshwise.checker.one_device import one_device
from meshwise.checker.proof import CheckSpec
from meshwise.parallel.layout import cuts_of
from meshwise.parallel.shard_refusals import add_advice
from meshwise.spec.plan import Plan
from meshwise.torch_compat.modules import parameters_in
from meshwise.training.job.loop import run_job
from meshwise.training.job.options import RunOptions


class Symmetric(nn.Module):
    """Counts how often it is asked."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, weight: Tensor) -> Tensor:
        self.calls += 1
        return weight.triu() + weight.triu(1).mT


def layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 8))


def pruned() -> nn.Module:
    model = layers()
    prune.l1_unstructured(model[2], "weight", 0.5)
    prune.random_structured(model[0], "weight", 0.25, dim=0)
    return model


def symmetric() -> nn.Module:
    model = layers()
    parametrize.register_parametrization(model[2], "weight", Symmetric())
    return model


def normed() -> nn.Module:
    model = layers()
    parametrizations.spectral_norm(model[2])
    return model


class Saved(nn.Module):
    """Layers of which each has a checkpoint, or each two."""

    def __init__(self, two: bool) -> None:
        super().__init__()
        self.layers, self.two = nn.ModuleList(nn.Linear(8, 8) for _ in range(4)), two

    def some(self, x: Tensor, first: int, last: int) -> Tensor:
        for layer in self.layers[first:last]:
            x = torch.tanh(layer(x))
        return x

    def forward(self, x: Tensor) -> Tensor:
        step = 2 if self.two else 1
        for first in range(0, 4, step):
            x = checkpoint(self.some, x, first, first + step, use_reentrant=False)  # type: ignore[assignment]
        return x


def job(model: Any) -> mw.Job:
    x = torch.randn(32, 8, generator=torch.Generator().manual_seed(1))
    return mw.Job(
        name="utilities",
        model=model,
        loss=lambda model, batch: nn.functional.mse_loss(model(batch[0]), batch[1]),
        optimizer=lambda params: torch.optim.SGD(params, 0.1),
        data=lambda: (x, x.sin()),
        batch_size=8,
        epochs=2,
    )


def trained(plan: Plan, model: Any) -> list[float]:
    options = RunOptions(plan=replace(plan, precision="fp64"), log_every=1)
    losses: list[float] = run_job(job(model), options, None)["losses"]
    return losses


@pytest.mark.parametrize("model", [pruned, symmetric, normed])
def test_a_computed_weight_under_tensor_is_that_of_one_device(model: Any, pool: Any) -> None:
    want = trained(Plan(), model)
    for found in pool(2).run(trained, Plan(tensor=2), model):
        assert found == pytest.approx(want, rel=1e-9)


@pytest.mark.parametrize("plan", [Plan(tensor=2), Plan(shard=2), Plan(data=2)])
def test_a_call_with_weights_that_are_given_is_that_of_one_device(plan: Plan, pool: Any) -> None:
    def given(plan: Plan) -> list[float]:
        class Given(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.inner = layers()

            def forward(self, x: Tensor) -> Tensor:
                weights = {name: p * 0.5 for name, p in self.inner.named_parameters()}
                out: Tensor = functional_call(self.inner, weights, (x,))
                return out

        return trained(plan, Given)

    want = given(Plan())
    for found in pool(2).run(given, plan):
        assert found == pytest.approx(want, rel=1e-9)


def test_a_computed_weight_is_not_computed_to_find_what_is_split() -> None:
    model = symmetric()
    kept = model[2].parametrizations.weight[0]  # type: ignore[index,union-attr]
    before = kept.calls
    cuts = cuts_of(model, 2)
    assert kept.calls == before and "weight" not in parameters_in(model[2])
    assert id(model[0].weight) in cuts and id(model[4].weight) in cuts


@pytest.mark.parametrize("model", [symmetric, normed])
def test_check_makes_a_model_that_registers_a_parametrization(model: Any) -> None:
    assert one_device(job(model), CheckSpec(Plan(data=2), 1)).steps[0].loss > 0


@pytest.mark.parametrize("two", [False, True])
def test_checkpoints_that_are_not_reentrant_run_in_a_pipeline(two: bool, pool: Any) -> None:
    want = trained(Plan(accumulate=2), lambda: Saved(two))
    for found in pool(2).run(trained, Plan(pipeline=2, accumulate=2), lambda: Saved(two)):
        assert found == pytest.approx(want, rel=1e-9)


def test_reading_a_part_of_a_parameter_as_if_it_were_whole_is_explained(pool: Any) -> None:
    def flat() -> tuple[list[str], int]:
        model: Any = mw.distribute(nn.Linear(4, 1), plan=Plan(shard=2), view="rank")
        size = model.weight.full_tensor().view(-1).numel()
        try:
            model.weight.view(-1)
        except RuntimeError as error:
            add_advice(error)
            return error.__notes__, size
        return [], size

    for notes, size in pool(2).run(flat):
        assert size == 4 and any("p.full_tensor() returns the whole parameter" in note for note in notes)


def test_pruning_parts_of_parameters_is_explained(pool: Any) -> None:
    def late() -> list[str]:
        model: Any = mw.distribute(layers(), plan=Plan(shard=2), view="rank")
        try:
            prune.l1_unstructured(model[2], "weight", 0.5)
        except RuntimeError as error:
            add_advice(error)
            return error.__notes__
        return []

    for notes in pool(2).run(late):
        assert any("Prune the model before mw.distribute" in note for note in notes)
