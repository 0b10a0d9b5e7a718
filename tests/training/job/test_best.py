"""The best epoch of a job, early stopping, evaluations now and then, callbacks: the same on one device and on several.
Of records/metrics.py too."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import meshwise as mw
from meshwise.records.metrics import Best, read_best
from meshwise.records.run_list import best_of, run_entry
from meshwise.reports.read import read_timeline
from meshwise.spec.errors import CheckpointError, UsageError
from meshwise.spec.plan import Plan
from meshwise.training.job.loop import run_job
from meshwise.training.job.options import RunOptions
from meshwise.training.recovery.weights import save_weights

SCORES = [0.5, 0.8, 0.7, 0.8, math.nan, 0.6, 0.9]
"""What the job below is worth after each epoch."""


def job(scores: list[float] = SCORES, **given: Any) -> mw.Job:
    """Its weight counts its steps, of which an epoch has two; its accuracy is what the scores say of the epoch."""

    def metrics(model: nn.Module, batch: Any) -> Any:
        epoch = round(-10 * float(model.weight.detach().sum())) // 2
        return {"accuracy": torch.tensor(scores[epoch - 1] if epoch else 0.0), "error": torch.tensor(1.0)}

    def model() -> nn.Module:
        made = nn.Linear(1, 1, bias=False)
        nn.init.zeros_(made.weight)
        return made

    facts: dict[str, Any] = {"name": "counts", "epochs": len(scores), "batch_size": 4} | given
    return mw.Job(
        model=model,
        loss=lambda model, batch: model(batch[0]).mean(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, 0.1),
        data=lambda: (torch.ones(8, 1),),
        test=lambda: (torch.ones(3, 1),),
        metrics=metrics,
        **facts,
    )


def ran(job: mw.Job, folder: Path, **options: Any) -> dict[str, Any]:
    return run_job(job, RunOptions(plan=options.pop("plan", Plan()), **options), folder)


def evaluated(folder: Path) -> list[int]:
    lines = (json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines())
    return [line["epoch"] for line in lines if "test" in line]


def test_the_weights_of_the_best_epoch_are_kept_and_say_which_it_is(tmp_path: Path) -> None:
    result = ran(job(best="max accuracy", epochs=4), tmp_path)
    best = Best("accuracy", "max", pytest.approx(0.8), 2, 4)
    assert result["best"] == best == read_best(tmp_path)  # the first of two that are equal
    assert load_file(tmp_path / "best.safetensors")["weight"].item() == pytest.approx(-0.4)
    assert load_file(tmp_path / "weights.safetensors")["weight"].item() == pytest.approx(-0.8)
    model = job().model()
    mw.load_weights(model, tmp_path / "best.safetensors")
    assert model.weight.item() == pytest.approx(-0.4)  # type: ignore[union-attr, operator]


def test_the_least_may_be_the_best_and_what_is_no_number_never_is(tmp_path: Path) -> None:
    scores = [math.nan, 0.5, 0.3, math.nan, 0.4]
    assert ran(job(scores, best="min accuracy"), tmp_path)["best"].epoch == 3
    assert ran(job([math.nan] * 4, best="min accuracy", patience=2), tmp_path)["epochs"] == 2


def test_patience_ends_a_training_that_gets_no_better(tmp_path: Path) -> None:
    result = ran(job(best="max accuracy", patience=3), tmp_path)
    assert (result["epochs"], result["status"], result["best"].epoch) == (5, "finished", 2)
    assert result["notes"] == ("Ended after epoch 5: accuracy has not been better since epoch 2 (patience=3).",)
    assert ran(job(best="max accuracy", patience=5), tmp_path / "longer")["epochs"] == 7


def test_evaluations_now_and_then_and_at_the_end(tmp_path: Path) -> None:
    result = ran(job(best="max accuracy", validate_every=3), tmp_path)
    assert evaluated(tmp_path) == [3, 6, 7] and result["best"].epoch == 7
    result = ran(job(best="max accuracy", validate_every=2, patience=1, epochs=7), tmp_path / "patience")
    assert evaluated(tmp_path / "patience") == [2, 4] and result["epochs"] == 4


STEPS = [0.1, 0.8, 0.2, 0.3, 0.4, 0.5, 0.7, 0.9, 0.1, 0.2]
"""What the job below is worth after each step, where it is asked after each second one, or third."""


def by_step(**given: Any) -> mw.Job:
    """The job above, of five epochs of two steps."""

    def metrics(model: nn.Module, batch: Any) -> Any:
        step = round(-10 * float(model.weight.detach().sum()))
        return {"accuracy": torch.tensor(STEPS[step - 1] if step else 0.0)}

    return replace(job([0.0] * 5), **{"metrics": metrics, "best": "max accuracy"} | given)


def evaluated_at(folder: Path) -> list[int]:
    lines = (json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines())
    return [line["step"] for line in lines if "test" in line]


def test_evaluations_may_be_counted_in_steps(tmp_path: Path) -> None:
    ends: list[tuple[int, float | None, bool]] = []

    def keep(end: mw.EpochEnd) -> None:
        ends.append((end.step, end.metrics.get("accuracy"), end.best))

    result = ran(by_step(validate_every="3 steps", callbacks=keep), tmp_path)
    assert evaluated_at(tmp_path) == [3, 6, 9, 10]  # and at the end
    assert result["best"] == Best("accuracy", "max", pytest.approx(0.5), 3, 6)
    fifth = pytest.approx(0.5), True
    assert ends == [(2, None, False), (4, None, False), (6, *fifth), (8, None, False), (10, pytest.approx(0.2), False)]
    assert load_file(tmp_path / "best.safetensors")["weight"].item() == pytest.approx(-0.6)


def test_patience_counts_evaluations_in_the_middle_of_an_epoch_too(tmp_path: Path) -> None:
    result = ran(by_step(validate_every="1 step", patience=3), tmp_path)
    assert (result["steps"], result["epochs"], result["status"]) == (5, 2, "finished")
    assert evaluated_at(tmp_path) == [1, 2, 3, 4, 5]
    assert result["notes"] == ("Ended after step 5: accuracy has not been better since step 2 (patience=3).",)
    assert load_file(tmp_path / "weights.safetensors")["weight"].item() == pytest.approx(-0.5)


@pytest.mark.parametrize("stop", [3, 4, 5, 6, 7])
@pytest.mark.parametrize("every", ["2 steps", "3 steps"])
def test_a_resumed_run_is_evaluated_after_the_same_steps(every: str, stop: int, tmp_path: Path) -> None:
    program = by_step(validate_every=every, patience=3)
    whole = ran(program, tmp_path / "whole")
    calls = iter(range(100))

    def loss(model: nn.Module, batch: Any) -> Any:
        if next(calls) == stop:
            raise InterruptedError
        return program.loss(model, batch)

    with pytest.raises(InterruptedError):
        ran(replace(program, loss=loss), tmp_path / "cut", save_every=1)
    result = ran(program, tmp_path / "cut", resume=tmp_path / "cut")
    assert evaluated_at(tmp_path / "cut") == evaluated_at(tmp_path / "whole")
    for name in ("best", "steps", "epochs", "metrics", "notes"):
        assert result[name] == whole[name]


@pytest.mark.parametrize("stop", [2, 6, 8])
def test_a_resumed_run_has_the_best_that_it_had(stop: int, tmp_path: Path) -> None:
    calls: list[int] = []

    def interrupted(end: mw.EpochEnd) -> None:
        if end.step == stop:
            raise InterruptedError

    with_best = job(best="max accuracy", patience=3)
    with pytest.raises(InterruptedError):
        ran(replace(with_best, callbacks=[interrupted]), tmp_path, save_every=1)
    go_on = replace(with_best, callbacks=lambda end: calls.append(end.epoch))
    result = ran(go_on, tmp_path, resume=tmp_path)
    assert (result["epochs"], result["best"].epoch) == (5, 2)
    assert calls == list(range(stop // 2, 6))  # that of the epoch in which it was stopped too
    assert evaluated(tmp_path)[-1] == 5 and read_best(tmp_path) == result["best"]


def test_a_run_that_kept_the_best_by_another_metric_is_not_resumed_by_this_one(tmp_path: Path) -> None:
    ran(job(best="max accuracy", epochs=2), tmp_path)
    with pytest.raises(
        UsageError, match=r"best='min error', but the resumed run was started with 'max accuracy'\. Use this value"
    ):
        ran(job(best="min error"), tmp_path, resume=tmp_path)
    (tmp_path / "best.safetensors").write_bytes(b"nothing")
    with pytest.raises(CheckpointError, match=r"best\.safetensors cannot be read"):
        ran(job(best="max accuracy"), tmp_path, resume=tmp_path)
    assert best_of(tmp_path) is None


def test_lists_and_reports_name_the_best(tmp_path: Path) -> None:
    ran(job(best="min error", epochs=2), tmp_path)
    (tmp_path / "run.json").write_text('{"job": "counts", "status": "finished"}')
    entry = run_entry(tmp_path)
    assert (entry.metric, entry.last, entry.best) == ("error", 1.0, 1.0)
    assert read_timeline(tmp_path).facts["best"] == "error 1 in epoch 1"


def test_callbacks_get_the_epoch_and_the_model_trains_on(tmp_path: Path) -> None:
    ends: list[mw.EpochEnd] = []

    def keep(end: mw.EpochEnd) -> None:
        ends.append(end)
        end.model.eval()

    ran(job(best="max accuracy", validate_every=2, epochs=5, callbacks=keep), tmp_path)
    assert [(end.epoch, end.epochs, end.step, end.best) for end in ends] == [
        (1, 5, 2, False),
        (2, 5, 4, True),
        (3, 5, 6, False),
        (4, 5, 8, False),
        (5, 5, 10, False),
    ]
    assert [dict(end.metrics) for end in ends][:2] == [{}, {"accuracy": pytest.approx(0.8), "error": 1.0}]
    assert ends[0].loss is not None and ends[-1].model.training and isinstance(ends[0].optimizer, torch.optim.SGD)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"best": "accuracy"}, r"best='accuracy' must be a direction and a metric of the test set"),
        ({"best": ""}, "must be a direction and a metric"),
        ({"best": "max accuracy", "test": None}, r"metric of the test set, .* needs test="),
        ({"patience": 3}, r"patience=3 needs best=\. Add best='max accuracy'"),
        ({"best": "max accuracy", "patience": 0}, "patience=0 must be a whole number of at least 1"),
        ({"validate_every": 0.5}, r"validate_every=0\.5 must be a whole number of at least 1"),
        ({"validate_every": "0 steps"}, r"validate_every='0 steps' must be a whole number of at least 1"),
        ({"validate_every": "often"}, r"validate_every='often' .* epochs, or a number of steps such as \"500 steps\""),
    ],
)
def test_what_says_nothing_is_refused(given: Any, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        replace(job(), **given)


def test_a_metric_that_there_is_not_is_refused_before_an_epoch_is_over(tmp_path: Path) -> None:
    with pytest.raises(
        UsageError, match=r"best='max acuracy' names no metric\. The metrics are accuracy, error\. Did you mean 'acc"
    ):
        ran(job(best="max acuracy"), tmp_path)
    assert not (tmp_path / "metrics.jsonl").exists()


def test_a_file_of_another_program_has_no_best(tmp_path: Path) -> None:
    assert read_best(tmp_path) is None
    save_weights(nn.Linear(1, 1), tmp_path / "best.safetensors")
    with pytest.raises(CheckpointError):
        read_best(tmp_path)


def real(folder: str, devices: str) -> Any:
    """A training whose best is somewhere in its middle, as far as anybody knows."""
    x = torch.randn(57, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    epochs: list[tuple[int, bool, float]] = []
    plan = {"1": Plan(), "2": Plan(data=2), "3": Plan(data=3), "shard": Plan(shard=2)}[devices]
    result = run_job(
        mw.Job(
            name="real",
            model=lambda: nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1)).double(),
            loss=lambda model, batch: nn.functional.mse_loss(model(batch[0]), batch[1]),
            optimizer=lambda parameters: torch.optim.SGD(parameters, 0.5, momentum=0.9),
            data=lambda: (x[:40], x[:40].sum(1, keepdim=True)),
            test=lambda: (x[40:], x[40:].sum(1, keepdim=True)),
            batch_size=8,
            epochs=12,
            best="min loss",
            patience=3,
            callbacks=lambda end: epochs.append((end.epoch, end.best, end.metrics["loss"])),
        ),
        RunOptions(plan=plan),
        Path(folder),
    )
    return result["epochs"], result["best"].epoch, [(e, b) for e, b, _ in epochs], [v for *_, v in epochs]


@pytest.mark.parametrize("devices", ["2", "shard", pytest.param("3", marks=pytest.mark.slow)])
def test_several_devices_choose_the_epoch_that_one_device_chooses(
    devices: str, pool: Callable[[int], Any], tmp_path: Path
) -> None:
    one = real(str(tmp_path / "one"), "1")
    size = 3 if devices == "3" else 2
    several = pool(size).run(real, str(tmp_path / "several"), devices)
    assert one[0] < 12  # it ends early
    for of_rank in several:
        assert of_rank[:3] == one[:3]
        torch.testing.assert_close(of_rank[3], one[3], rtol=1e-9, atol=0)
    kept = [load_file(tmp_path / name / "best.safetensors") for name in ("one", "several")]
    torch.testing.assert_close(kept[1], kept[0], rtol=1e-9, atol=1e-12)
