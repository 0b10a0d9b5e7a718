"""`run --plan auto`: what it chooses and says, what the run keeps of it, and what is refused.

Of launcher/auto.py too; `predicted_of_run` of launcher/run.py.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

import meshwise as mw
from meshwise.launcher import auto
from meshwise.launcher.auto import with_plan
from meshwise.launcher.run import predicted_of_run
from meshwise.planner import estimator
from meshwise.planner.options import PlanOptions
from meshwise.planner.plan import Plans
from meshwise.planner.search import Search
from meshwise.spec.errors import PlanError, UsageError
from meshwise.spec.machine import Machine
from meshwise.spec.plan import Plan
from meshwise.spec.plan_file import plan_from_toml, plan_to_toml
from meshwise.spec.prediction import Prediction, prediction_in, prediction_to_toml
from meshwise.training.job.options import PlanText, RunOptions
from meshwise.training.jobs.registry import find_job
from tests.planner.test_search import estimate

Told = tuple[RunOptions, str]


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Told]:
    """`chosen(estimates…)` of two CPU workers: the options of the run, and what was printed."""

    def choose(*estimates: object, **given: object) -> Told:
        asked: list[PlanOptions] = []

        def plan_options(options: PlanOptions) -> Plans:
            asked.append(options)
            return Plans("mnist-mlp", 64, Machine("2xcpu", ()), Search(tuple(estimates), (), (), 1.0))

        monkeypatch.setattr(auto, "plan_options", plan_options)
        monkeypatch.setattr(auto, "bench", lambda *_, **__: SimpleNamespace(machine=Machine("2xcpu", ())))
        text = io.StringIO()
        words = {"devices": "2xcpu", **given}
        found = with_plan(RunOptions(job="mnist-mlp", plan="auto", **words), Console(file=text, width=200))
        assert [len(options.machine.devices) for options in asked] == [2]
        return found, text.getvalue()

    return choose


def test_the_fastest_that_fits_is_taken_and_said_why(chosen: Callable[..., Told]) -> None:
    options, said = chosen(estimate(Plan(data=2), 0.1, 50), estimate(Plan(shard=2), 0.2, 40))
    assert isinstance(options.plan, PlanText) and plan_from_toml(options.plan.text) == Plan(data=2)
    assert options.devices == "2xcpu"
    assert "2 plans rehearsed in 1.0 s" in said and "\nplan auto: data=2. Why not shard=2" in said
    assert "Why not shard=2: 100 ms longer, 10 B less memory." in said


def test_one_device_may_be_the_best_of_two(chosen: Callable[..., Told]) -> None:
    other = estimate(Plan(recompute="full"), 0.15, 40)
    options, said = chosen(estimate(Plan(), 0.1, 50), other, estimate(Plan(data=2), 0.2, 50))
    assert options.devices == "1xcpu" and "data=1 on 1 of 2 devices" in said
    assert "Why not data=2: 100 ms longer" in said


def test_where_times_are_not_known_the_simplest_is_taken(chosen: Callable[..., Told]) -> None:
    def unknown(plan: Plan, memory: int):
        return replace(estimate(plan, 1, memory), seconds=None, unknown="no figure is known for all-reduce of 2 ranks")

    options, said = chosen(estimate(Plan(), 0.1, 50), unknown(Plan(shard=2), 30), unknown(Plan(data=2), 50))
    assert isinstance(options.plan, PlanText) and plan_from_toml(options.plan.text) == Plan(data=2)
    fits = "This is the simplest plan that fits on all devices. Times are not known: no figure is known for all-reduce"
    assert fits in said


def test_nothing_that_fits_is_refused_with_the_smallest(chosen: Callable[..., Told]) -> None:
    with pytest.raises(
        PlanError, match=r"none of 2 plans is certain to fit in memory\. One may need 132 B, but a device has 100 B"
    ):
        chosen(estimate(Plan(), 0.1, 200), estimate(Plan(data=2), 0.1, 120))


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"plan": "auto", "nnodes": 2, "master_addr": "here"}, "--plan auto works only on one machine"),
    ],
)
def test_what_it_cannot_do_is_refused(given: dict[str, object], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        with_plan(RunOptions(job="mnist-mlp", **given), Console(quiet=True))


def test_a_script_is_refused_before_it_is_run(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("raise AssertionError('it was run')\n")
    with pytest.raises(UsageError, match="--plan auto works only for jobs, not for scripts"):
        mw.run(str(tmp_path / "train.py"), devices="1xcpu", plan="auto")


def test_a_plan_that_is_not_of_a_run_says_where_auto_is() -> None:
    with pytest.raises(UsageError, match="--plan auto works only for jobs, not for scripts"):
        RunOptions(plan="auto").plan_on(2)


def test_a_real_search_on_one_worker_keeps_its_prediction(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auto, "SECONDS", 0.01)
    monkeypatch.setattr(estimator, "MEASURE", float("inf"))  # a busy machine measures all operators too
    job = find_job("mnist-mlp")
    options = with_plan(RunOptions(job="mnist-mlp", plan="auto", devices="1xcpu"), Console(quiet=True))
    assert isinstance(options.plan, PlanText)
    predicted = prediction_in(options.plan.text)
    assert predicted is not None and (predicted.job, predicted.batch_size) == ("mnist-mlp", 64)
    assert predicted.seconds is not None and predicted.low < predicted.seconds < predicted.high
    kept = predicted_of_run(options, job, options.plan_on(1))["predicted"]
    assert kept["seconds"] == predicted.seconds and json.dumps(kept)


def test_a_prediction_of_another_run_is_not_kept() -> None:
    text = plan_to_toml(Plan(data=2)) + prediction_to_toml(Prediction("mnist-mlp", 64, "2xcpu"))
    job, options = find_job("mnist-mlp"), RunOptions(plan=PlanText(text))
    assert predicted_of_run(options, job, Plan(data=2))["predicted"]["machine"] == "2xcpu"
    assert "is not shown" in predicted_of_run(options, job, Plan(data=2, zero1=True))["predicted"]
    other = predicted_of_run(options, replace(job, batch_size=32), Plan(data=2))["predicted"]
    assert "is not shown: it belongs to mnist-mlp with a global batch of 64 and Plan(data=2)." in other
    assert predicted_of_run(RunOptions(), job, Plan()) == {}


@pytest.mark.slow
def test_a_run_that_chose_its_plan_stands_beside_the_prediction(tmp_path: Path, processes: None) -> None:
    from meshwise import report, run

    done = run("mnist-mlp", devices="2xcpu", plan="auto", batch_size=5000, epochs=1, out=tmp_path)
    found = report(done.folder)
    assert found.predicted is not None and found.predicted.seconds is not None
    assert prediction_in((Path(done.folder) / "plan.toml").read_text()) is not None
