"""`--on-nan back`: a run that leaves batches out has the numbers of the loop whose data never had them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from meshwise.records import folder as names
from meshwise.records.files import read_lines
from meshwise.spec.errors import LossError, SpoiledError, UsageError
from meshwise.spec.plan import Plan
from meshwise.training.job.loop import run_job
from meshwise.training.job.not_finite import MOST_IN_A_ROW, NotFinite
from meshwise.training.job.options import RunOptions
from meshwise.training.recovery.state import RunState
from tests.faults.job_with_nan import BATCH, EPOCHS, by_hand, deep, job, y
from tests.faults.runs import CommandRun, run_folder
from tests.pool import Pool

BACK = RunOptions(on_nan="back", log_every=3)
NAN = float("nan")


def largest_difference(folder: Path, losses: list[float], net: nn.Module) -> float:
    """Of the losses and of the final weights."""
    lines = [line for line in read_lines(folder / names.METRICS) if "loss" in line]
    assert [line["step"] for line in lines] == list(range(1, len(losses) + 1))
    mine, weights = [line["loss"] for line in lines], load_file(folder / names.WEIGHTS)
    found = [abs(a - b) for a, b in zip(mine, losses, strict=True)]
    return max([*found, *(float((weights[name] - t).abs().max()) for name, t in net.state_dict().items())])


def trained(folder: str, plan: Plan) -> Any:
    said: list[tuple[str, Any]] = []
    one = job if plan.pipeline == 1 else deep
    made = run_job(one, replace(BACK, plan=plan), Path(folder), lambda kind, **facts: said.append((kind, facts)))
    return made["steps"], [facts["text"] for kind, facts in said if kind == "told"]


PLANS = {
    "data": Plan(data=2, precision="fp64"),
    "zero1": Plan(data=2, precision="fp64", zero1=True),
    "shard": Plan(shard=2, precision="fp64"),
    "pipeline": Plan(pipeline=2, accumulate=2, precision="fp64"),
}


@pytest.mark.parametrize(
    "name", [name if name in ("shard", "pipeline") else pytest.param(name, marks=pytest.mark.slow) for name in PLANS]
)
def test_the_batches_are_left_out_on_two_ranks_as_by_hand(name: str, pool: Any, tmp_path: Path) -> None:
    workers: Pool = pool(2)
    (steps, said), (_, others) = workers.run(trained, str(tmp_path), PLANS[name])
    losses, net = by_hand(job=job if name != "pipeline" else deep)
    assert largest_difference(tmp_path, losses, net) < 1e-9
    assert steps == len(losses) < EPOCHS * len(y) / BATCH and others == []
    assert len(said) == len(read_lines(tmp_path / names.LEFT_OUT)) == 2 * EPOCHS


def test_on_one_device_too_and_a_run_that_goes_on_does_not_meet_them_again(tmp_path: Path) -> None:
    plan = Plan(precision="fp64")
    (tmp_path / names.RUN).write_text(json.dumps({"sessions": []}))
    half = replace(job, epochs=1)
    run_job(half, replace(BACK, plan=plan), tmp_path)
    before = (tmp_path / names.LEFT_OUT).read_text()
    run_job(half, replace(BACK, plan=plan, on_nan="stop", resume=tmp_path), tmp_path)  # done already
    assert (tmp_path / names.LEFT_OUT).read_text() == before
    run_job(job, replace(BACK, plan=plan, resume=tmp_path), tmp_path)
    assert largest_difference(tmp_path, *by_hand()) < 1e-12


@pytest.mark.usefixtures("processes")
def test_spoiled_parameters_go_back_to_the_saved_state_and_leave_out_two_batches(tmp_path: Path) -> None:
    words = ("--devices", "2xcpu", "--set", "precision=fp64", "--on-nan", "back", "--save-every", "4")
    run = CommandRun(f"{job_file()}:job", *words, "--fault", "nan:rank=1,step=7", out=tmp_path)
    assert run.wait() == 0, run.output
    assert "step 7: Training continues without samples 112 to 127 of epoch 1 and samples 128" in run.output
    assert "attempt 2 of 4 begins from the state saved at step 4." in run.output
    folder = run_folder(tmp_path)
    gone = [
        (line["epoch"], line["first"] // BATCH) for line in read_lines(folder / names.LEFT_OUT) if line["epoch"] == 0
    ]
    losses, net = by_hand(lambda epoch, batch: (epoch, batch) in gone)
    assert largest_difference(folder, losses, net) < 1e-9
    first, second = names.read_run(folder)["sessions"]
    assert (first["kind"], first["rank"], first["step"], second["steps_lost"]) == ("spoiled", 1, 7, 2)
    assert len(first["told"]) == 3 and first["told"][0].startswith("step ")


def job_file() -> Path:
    return Path(__file__).parents[2] / "faults" / "job_with_nan.py"


# The decision alone.


def state_of(model: nn.Module) -> RunState:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return RunState(model, optimizer, None, torch.amp.GradScaler("cpu", enabled=False), seed=0)


@pytest.fixture
def model() -> nn.Module:
    return nn.Linear(2, 1)


def step(left: NotFinite, value: float, number: int = 0) -> bool:
    left.last.append((0, number * 4, number * 4 + 4))
    left.step_begins()
    return left.skips(1, [(torch.tensor(value), 1.0)])


def nobody(text: str) -> None:
    pass


def test_a_loss_is_enough(model: nn.Module) -> None:
    left = NotFinite("back", state_of(model), None, nobody, scaled=False)
    assert [step(left, value, number) for number, value in enumerate((1.0, NAN, 2.0, float("inf")))] == [
        *(False, True, False, True)
    ]
    assert left.ranges(0) == [(4, 8), (12, 16)] and left.ranges(0, 8) == [(12, 16)] and left.ranges(1) == []


def test_under_a_loss_scaler_gradients_are_its_own(model: nn.Module) -> None:
    model.weight.grad = torch.full_like(model.weight, NAN)
    assert step(NotFinite("back", state_of(model), None, nobody, scaled=False), 1.0)
    assert not step(NotFinite("back", state_of(model), None, nobody, scaled=True), 1.0)


def test_too_many_in_a_row_end_the_run(model: nn.Module) -> None:
    left = NotFinite("back", state_of(model), None, nobody, scaled=False)
    with pytest.raises(LossError, match="20 batches in a row"):
        for number in range(MOST_IN_A_ROW + 1):
            step(left, NAN, number)


def test_a_state_that_is_spoiled_is_not_gone_on_with(model: nn.Module, tmp_path: Path) -> None:
    left = NotFinite("back", state_of(model), tmp_path, nobody, scaled=False)
    assert not step(left, 1.0)
    left.refuse_spoiled(1)
    with torch.no_grad():
        model.weight[0, 1] = NAN
    with pytest.raises(SpoiledError, match=r"step 1: parameters of rank 0 are not finite") as caught:
        step(left, NAN, 1)
    assert caught.value.ranks == (0,)
    assert NotFinite("back", state_of(model), tmp_path, nobody, scaled=False).ranges(0) == [(0, 4), (4, 8)]


def test_an_optimizer_that_runs_the_loss_itself_is_refused() -> None:
    made = replace(job, optimizer=lambda parameters: torch.optim.LBFGS(parameters))
    with pytest.raises(UsageError, match="--on-nan back: LBFGS changes the parameters several times"):
        run_job(made, BACK, folder=None)
