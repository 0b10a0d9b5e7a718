"""A training loop under any plan is that of one device, also saved under one plan and resumed under another.

In float64, where equal is within 1e-9, with all that carries state from step to step. Tests `training/job/step.py`.

Of training/job/run.py too.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import meshwise as mw
from meshwise.parallel.shard_refusals import add_advice
from meshwise.records import folder as names
from meshwise.spec.errors import PlanError, UsageError
from meshwise.spec.plan import Plan
from meshwise.training.job.loop import run_job
from meshwise.training.job.options import RunOptions
from meshwise.training.process.session import end_sessions
from meshwise.training.recovery.loading import load
from tests.pool import CaseFailed


class Net(nn.Module):
    """Repeated layers large enough to be gathered by themselves, a batch norm, tied weights, a frozen parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(6, 66), nn.BatchNorm1d(66)
        self.layers = nn.ModuleList(nn.Linear(66, 66) for _ in range(3))
        self.back = nn.Linear(66, 6, bias=False)
        self.back.weight = nn.Parameter(self.first.weight.detach().T.contiguous())
        self.scale = nn.Parameter(torch.full((6,), 0.5), requires_grad=False)
        self.out, self.again = nn.Linear(6, 6), nn.Linear(6, 6)
        self.again.weight = self.out.weight

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.norm(self.first(x)))
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return self.again(torch.tanh(self.out(self.back(x) * self.scale)))


def error(model: nn.Module, batch: Any) -> Tensor:
    return nn.functional.mse_loss(model(batch[0]), batch[1])


def job(epochs: int = 2) -> mw.Job:
    """Batches of 8, 8, 8, 8, 8 and 3 samples: the last one leaves ranks without any."""
    x = torch.randn(43, 6, generator=torch.Generator().manual_seed(1))
    return mw.Job(
        name="net",
        model=Net,
        loss=error,
        optimizer=lambda params: torch.optim.AdamW([p for p in params if p.requires_grad], lr=0.01, amsgrad=True),
        scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 4, 0.5),
        data=lambda: (x, x.sin()),
        test=lambda: (x[:13], x[:13].sin()),
        metrics=lambda model, batch: {"error": error(model, batch)},
        clip_norm=0.5,
        batch_size=8,
        epochs=epochs,
    )


PLANS = {
    "one": Plan(),
    "data": Plan(data=2),
    "shard": Plan(shard=2),
    "shard3": Plan(shard=3),
    "zero1": Plan(data=2, zero1=True),
    "both": Plan(data=2, shard=2, recompute="full"),
    "kept": Plan(shard=2, reshard=False, recompute="selective"),
    "moved": Plan(shard=2, offload=("activations",)),
}


def settings(plan: Plan, **more: Any) -> RunOptions:
    return RunOptions(plan=replace(plan, precision="fp64"), log_every=1, **more)


def trained(plan: Plan, folder: str, **more: Any) -> Any:
    result = run_job(job(), settings(plan, **more), Path(folder))
    return result["losses"], result["metrics"]


def half(plan: Plan, folder: str) -> Any:
    """Train, saving every step, and stop as a crash would: in the middle of the second epoch."""
    calls = {"count": 0}

    def loss(model: Any, batch: Any) -> Any:
        if model.training:
            calls["count"] += 1
        if calls["count"] > 8 * plan.accumulate:
            raise InterruptedError
        return error(model, batch)

    try:
        run_job(replace(job(), loss=loss), settings(plan, save_every=1), Path(folder))
    except InterruptedError:
        return True


def on(pool: Any, plan: Plan, case: Any, *arguments: Any) -> Any:
    ranks = [case(plan, *arguments)] if plan.devices == 1 else pool(plan.devices).run(case, plan, *arguments)
    assert all(rank == ranks[0] for rank in ranks[1:])
    return ranks[0]


@pytest.fixture(scope="module")
def one_device(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("one")
    return *trained(Plan(), str(folder)), load_file(folder / "weights.safetensors")


def quick(name: str, among: tuple[str, ...]) -> Any:
    """`make test` runs a part, `make suite` all."""
    return pytest.param(name, marks=[] if name in among else pytest.mark.slow)


@pytest.mark.parametrize("name", [quick(name, ("zero1", "both")) for name in list(PLANS)[1:]])
def test_a_plan_trains_evaluates_and_saves_what_one_device_does(
    name: str, pool: Any, one_device: Any, tmp_path: Path
) -> None:
    losses, metrics = on(pool, PLANS[name], trained, str(tmp_path))
    want_losses, want_metrics, want_weights = one_device
    assert losses == pytest.approx(want_losses, abs=1e-9) and len(losses) == 12
    assert metrics == pytest.approx(want_metrics, abs=1e-9)
    weights = load_file(tmp_path / "weights.safetensors")
    assert weights.keys() == want_weights.keys()
    for key, value in want_weights.items():
        assert weights[key].shape == value.shape and (weights[key] - value).abs().max() < 1e-9, key
    saved = load(tmp_path / names.CHECKPOINTS).tree
    assert saved["model"]["again.weight"] is saved["model"]["out.weight"]  # tied, kept once
    assert len(saved["optimizer"][""]["state"]["state"]) == sum(p.requires_grad for p in Net().parameters())


def counted(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
    """A mean over the samples that begin with a positive number: each rank counts others."""
    counts = batch[0][:, 0] > 0
    each = (model(batch[0]) - batch[1]).square().mean(1)
    return (each * counts).sum() / counts.sum().clamp(min=1), counts.sum()


def weighed(plan: Plan) -> Any:
    return run_job(replace(job(1), loss=counted, test=None), settings(plan), None)["losses"]


@pytest.mark.parametrize("name", [quick(name, ("both",)) for name in ("data", "shard3", "zero1", "both")])
def test_weights_that_the_loss_knows_are_right_with_batch_norm_over_all_ranks(name: str, pool: Any) -> None:
    """Ranks' gradients meet inside the backward, so that weighing them after it would be too late."""
    assert on(pool, PLANS[name], weighed) == pytest.approx(weighed(Plan()), abs=1e-9)


PAIRS = [
    ("zero1", "both"),
    ("shard", "one"),
    ("one", "shard"),
    ("shard", "shard3"),
    ("both", "zero1"),
    ("data", "shard"),
    ("zero1", "data"),
    ("shard3", "zero1"),
]


@pytest.mark.parametrize(
    ("before", "after"),
    [pytest.param(*pair, marks=[pytest.mark.slow] * (number > 1)) for number, pair in enumerate(PAIRS)],
)
def test_a_run_saved_under_one_plan_goes_on_under_another(
    before: str, after: str, pool: Any, one_device: Any, tmp_path: Path
) -> None:
    assert on(pool, PLANS[before], half, str(tmp_path))
    losses, metrics = on(pool, PLANS[after], resumed, str(tmp_path))
    assert losses == pytest.approx(one_device[0][8:], abs=1e-9)
    assert metrics == pytest.approx(one_device[1], abs=1e-9)


def resumed(plan: Plan, folder: str) -> Any:
    return trained(plan, folder, resume=folder)


@pytest.mark.parametrize("name", ["shard", quick("zero1", ())])
def test_a_resumed_run_is_bitwise_the_run_that_was_not_stopped(name: str, pool: Any, tmp_path: Path) -> None:
    for folder in ("half", "whole"):  # as a launch does: where there is no folder, nothing is saved
        (tmp_path / folder).mkdir()
    assert on(pool, PLANS[name], half, str(tmp_path / "half"))
    rest = on(pool, PLANS[name], resumed, str(tmp_path / "half"))[0]
    assert rest == on(pool, PLANS[name], trained, str(tmp_path / "whole"))[0][8:]


def around_the_model(plan: Plan) -> None:
    def loss(model: Any, batch: Any) -> Tensor:
        return model.first(batch[0]).sum()

    run_job(replace(job(1), loss=loss), settings(plan), None)


@pytest.mark.slow
def test_a_layer_called_past_the_sharded_model_is_explained(pool: Any) -> None:
    with pytest.raises(
        CaseFailed, match=r"Sharded parameters are gathered only during model\(x\), but this code calls another method"
    ):
        pool(2).run(around_the_model, Plan(shard=2))


def test_an_optimizer_that_cannot_step_on_parts_is_explained(pool: Any) -> None:
    def case() -> None:
        run_job(replace(job(1), optimizer=lambda params: torch.optim.Rprop(params)), settings(Plan(shard=2)), None)

    with pytest.raises(CaseFailed, match=r"shard: Rprop may compute different values.*raised RuntimeError.*zero1=true"):
        pool(2).run(case)


@pytest.mark.parametrize("kind", [torch.optim.LBFGS, torch.optim.Adafactor])
def test_an_optimizer_of_whole_parameters_is_refused_under_shard(kind: Any, pool: Any) -> None:
    def case() -> list[str]:
        said = []
        for given in (True, False):
            model = nn.Linear(4, 4)
            optimizer = kind(model.parameters())
            with pytest.raises(PlanError) as refused:
                if given:
                    mw.distribute(model, optimizer, plan=Plan(shard=2), view="rank")
                mw.distribute(model, plan=Plan(shard=2), view="rank")
                kind(model.parameters()).step(lambda: 0.0)
            said.append(str(refused.value))
            end_sessions()
        return said

    for said in pool(2).run(case):
        assert all(t.startswith(f"shard: {kind.__name__} may compute different values if each rank") for t in said)


def by_lbfgs(plan: Plan, folder: str | None = None, **more: Any) -> Any:
    """Losses and the test error of a job with weights of its own, clipped, whose optimizer runs the loss several
    times a step."""
    own = job()
    own = replace(
        own,
        model=Dropped,
        loss=lambda model, batch: counted(model, batch) if model.training else error(model, batch),
        optimizer=lambda params: torch.optim.LBFGS(list(params), lr=0.5, max_iter=4, line_search_fn="strong_wolfe"),
    )
    result = run_job(own, settings(plan, **more), None if folder is None else Path(folder))
    assert result["samples"] == 2 * 43
    return result["losses"], result["metrics"]["error"]


class Dropped(nn.Module):
    """The line search needs the same masks whenever it asks."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.drop, self.last = nn.Linear(6, 16), nn.Dropout(0.2), nn.Linear(16, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.drop(torch.tanh(self.first(x))))


@pytest.mark.parametrize("name", ["data", quick("data3", ()), quick("accumulated", ())])
def test_a_job_with_lbfgs_trains_as_on_one_device(name: str, pool: Any) -> None:
    plans = {"data": Plan(data=2), "data3": Plan(data=3), "accumulated": Plan(data=2, accumulate=2)}
    exact = {"exact_random": True}
    plan = plans[name]
    ranks = pool(plan.devices).run(lambda: by_lbfgs(plan, **exact))
    losses, metric = by_lbfgs(replace(Plan(), accumulate=plan.accumulate), **exact)
    assert losses[-1] < losses[0] and all(rank == ranks[0] for rank in ranks)
    assert ranks[0][0] == pytest.approx(losses, rel=1e-9) and ranks[0][1] == pytest.approx(metric, rel=1e-9)


def test_a_job_with_lbfgs_refuses_a_scaled_loss() -> None:
    lbfgs = replace(job(1), optimizer=lambda params: torch.optim.LBFGS(list(params)))
    with pytest.raises(UsageError, match=r"job 'net': LBFGS computes the loss several times .* Use precision='bf16'"):
        run_job(lbfgs, RunOptions(plan=Plan(precision="fp16")), None)


def test_a_copy_of_a_sharded_model_is_explained(pool: Any) -> None:
    def case(after: bool | None) -> None:
        model = nn.Linear(8, 8)
        copied = copy.deepcopy(model)
        try:
            model = mw.distribute(model, plan=Plan(shard=2), view="rank")
            copied = copy.deepcopy(model) if after else copied
            if after is None:
                torch.optim.swa_utils.AveragedModel(copied).update_parameters(model)  # of torch/optim, and no optimizer
            with torch.no_grad():
                copied.weight.lerp_(model.weight, 0.1)
        except (RuntimeError, AssertionError) as error:
            add_advice(error)
            raise

    for after in (False, True, None):
        with pytest.raises(CaseFailed, match=r"Make a copy of the model \(such as an EMA\) before mw.distribute"):
            pool(2).run(case, after)


class Scaled(nn.Module):
    """Its layers are let go behind their forward; its own parameter stays gathered until its backward."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
        self.scale = nn.Parameter(torch.ones(64))

    def forward(self, x: Any) -> Any:
        return torch.tanh(self.layers(x)) * self.scale


def zeroed_late(plan: Plan, to_none: bool) -> list[float]:
    torch.manual_seed(0)
    model: Any = Scaled().double()
    optimizer: Any = torch.optim.SGD(model.parameters(), 0.5)
    loader: Any = DataLoader(TensorDataset(torch.randn(24, 64, dtype=torch.float64)), 4)
    model, optimizer, loader = mw.distribute(model, optimizer, loader, plan=plan, view="rank")
    losses = []
    for (x,) in loader:
        loss = (model(x) - 1).square().mean()
        model.zero_grad(set_to_none=to_none)
        losses.append(float(mw.backward(loss)))
        optimizer.step()
    return losses


@pytest.mark.parametrize("to_none", [True, False])
def test_gradients_that_are_zeroed_between_a_forward_and_its_backward_are_zero(to_none: bool, pool: Any) -> None:
    """DCGAN does so with its generator: gradients added up from step to step, in silence."""
    (one,) = pool(1).run(zeroed_late, Plan(), to_none)
    for losses in pool(2).run(zeroed_late, Plan(shard=2), to_none):
        assert losses == pytest.approx(one, rel=1e-12)
