"""The options of a run survive in run.json, and a resumed run takes from there what is not given."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import meshwise as mw
from meshwise.spec.errors import PlanError, UsageError
from meshwise.spec.options import check_script, options_of
from meshwise.spec.plan import Plan
from meshwise.spec.plan_file import plan_to_toml
from meshwise.spec.saves import Saves
from meshwise.training.job.options import PlanText, RunOptions

FULL = RunOptions(
    "mlp",
    devices="2xcpu",
    epochs=3,
    batch_size=64,
    seed=7,
    log_every=10,
    save_every=50,
    settings=("bucket_mb=5", "accumulate=2", "precision=bf16"),
    args=("lr=3e-4", "depth=2"),
)
RECORDED = [name for name, _, option in options_of(RunOptions) if option.recorded and name not in ("job", "args")]


def recorded(options: RunOptions) -> Any:
    """The facts of a run, through a file and back."""
    return json.loads(json.dumps({"request": options.record(), "status": "stopped"}))


def test_options_survive_their_record() -> None:
    assert RunOptions().resumed(recorded(FULL)) == FULL
    exact = RunOptions("mlp", plan=PlanText("zero1 = true"), exact_random=True)
    assert RunOptions().resumed(recorded(exact)) == exact


def test_the_place_of_a_run_is_not_recorded() -> None:
    here = RunOptions("mlp", resume="runs/a", out="elsewhere", nnodes=2, node_rank=1, rdzv_endpoint="host:1")
    assert RunOptions().resumed(recorded(here)) == RunOptions("mlp")
    assert RunOptions(resume="runs/a", out="here", nnodes=3).resumed(recorded(FULL)) == replace(
        FULL, resume="runs/a", out="here", nnodes=3
    )


@pytest.mark.parametrize("name", RECORDED)
def test_what_is_given_goes_before_the_record(name: str) -> None:
    new: dict[str, Any] = {
        "settings": ("bucket_mb=7",),
        "log": ("tensorboard",),
        "exact_random": True,
        "plan": Plan(data=2),
        "seed": 0,
        "on_nan": "back",
    }
    given = {name: new.get(name, "other" if isinstance(getattr(FULL, name), str) else 1)}
    others: Any = {"plan": {"settings": ()}, "settings": {"settings": (*FULL.settings[1:], "bucket_mb=7")}}
    assert RunOptions(**given).resumed(recorded(FULL)) == replace(FULL, **{**given, **others.get(name, {})})


@pytest.mark.parametrize(
    ("earlier", "given", "plan"),
    [
        (RunOptions(settings=("precision=bf16",)), RunOptions(settings=("precision=fp32",)), Plan(data=2)),
        (RunOptions(settings=("accumulate=4",)), RunOptions(settings=("shard=2",)), Plan(shard=2, accumulate=4)),
        (RunOptions(settings=("shard=2",)), RunOptions(settings=("data=2",)), Plan(data=2)),
        (RunOptions(settings=("shard=2",)), RunOptions(plan=PlanText("data = 2")), Plan(data=2)),
        (RunOptions(plan=PlanText('precision = "bf16"')), RunOptions(settings=("precision=fp32",)), Plan(data=2)),
    ],
)
def test_what_is_given_of_the_plan_goes_before_it_in_other_words(
    earlier: RunOptions, given: RunOptions, plan: Plan
) -> None:
    resumed = given.resumed(recorded(earlier))
    assert resumed.plan_on(2) == plan
    assert RunOptions().resumed(recorded(resumed)).plan_on(2) == plan


def test_the_same_job_may_be_named_again_but_no_other() -> None:
    assert RunOptions("mlp").resumed(recorded(FULL)) == FULL
    with pytest.raises(UsageError, match=r"the run to continue is of 'mlp', not of 'gpt'\. Leave the job out"):
        RunOptions("gpt").resumed(recorded(FULL))


def test_a_resumed_run_has_the_arguments_that_it_had() -> None:
    assert RunOptions(args=("depth=2",)).resumed(recorded(FULL)) == FULL
    assert RunOptions().resumed(recorded(RunOptions("mlp", args={"lr": 0.1}))).args == ("lr=0.1",)
    with pytest.raises(
        UsageError, match=r"--arg lr=1: the resumed run was started with lr=3e-4, depth=2\. Remove --arg"
    ):
        RunOptions(args=("lr=1",)).resumed(recorded(FULL))
    with pytest.raises(UsageError, match="was started with no arguments"):
        RunOptions(args=("lr=1",)).resumed(recorded(RunOptions("mlp")))


def test_the_run_of_a_script_is_not_resumed_for_it() -> None:
    with pytest.raises(UsageError, match=r"train.py is a script, and a script loads its state .* without --resume"):
        RunOptions().resumed({"job": "train.py", "arguments": []})


def test_the_plan_is_made_for_the_devices() -> None:
    assert FULL.plan_on(2) == Plan(data=2, accumulate=2, precision="bf16", bucket_mb=5)
    assert RunOptions().plan_on(4) == Plan(data=4)
    assert RunOptions(plan=Plan(shard=2)).plan_on(4) == Plan(shard=2)
    with pytest.raises(UsageError, match="accumulate=0"):
        RunOptions(settings=("accumulate=0",)).plan_on(1)


def test_settings_and_a_plan_file_make_the_plan(tmp_path: Path) -> None:
    assert RunOptions(settings=("recompute=full", "bucket_mb=1")).plan_on(2) == Plan(
        data=2, recompute="full", bucket_mb=1
    )
    assert RunOptions(settings=("zero1=true",)).plan_on(2) == Plan(data=2, zero1=True)
    assert RunOptions(settings=("shard=2",)).plan_on(4) == Plan(data=2, shard=2)
    file = tmp_path / "plan.toml"
    file.write_text(plan_to_toml(Plan(data=4, accumulate=2)))
    options = RunOptions(plan=file, settings=("accumulate=3", "precision=bf16"))
    assert options.plan_on(8) == Plan(data=4, accumulate=3, precision="bf16")
    file.unlink()  # it was read at once
    assert options.plan_on(8).data == 4 and RunOptions().resumed(recorded(options)) == options


def test_what_is_given_of_a_plan_makes_one_plan_together(tmp_path: Path) -> None:
    file = tmp_path / "plan.toml"
    file.write_text("pipeline = 2\ncompute_dtype = 'fp16'\n")
    assert RunOptions(settings=("pipeline=2", "accumulate=2")).plan_on(2) == Plan(pipeline=2, accumulate=2)
    assert RunOptions(plan=Plan(zero1=True, data=2), settings=("data=1", "shard=2", "zero1=false")).plan_on(2) == Plan(
        shard=2
    )
    assert RunOptions(plan=file, settings=("accumulate=4",)).plan_on(2) == Plan(
        pipeline=2, accumulate=4, compute_dtype="fp16"
    )
    with pytest.raises(PlanError, match=r"pipeline=2 with accumulate=1: .* Use accumulate=2 or more"):
        RunOptions(plan=file, settings=("accumulate=1",)).plan_on(2)


@pytest.mark.parametrize(
    ("name", "option"),
    [
        ("log_every", "--log-every must be at least 1, but"),
        ("save_every", "--save-every 0: must be at least 1"),
        ("keep", "--keep 0: must be at least 1"),
    ],
)
def test_every_no_step_is_refused(name: str, option: str) -> None:
    given: Any = {name: 0}
    with pytest.raises(UsageError, match=option):
        RunOptions(**given)


@pytest.mark.parametrize(
    ("given", "saves"),
    [
        ({}, Saves(None, None, 2)),
        ({"save_every": 500}, Saves(500)),
        ({"save_every": "500", "keep": 3}, Saves(500, None, 3)),
        ({"save_every": "1h30min"}, Saves(None, 5400.0, 2)),
    ],
)
def test_a_state_is_saved_after_steps_or_time(given: Any, saves: Saves) -> None:
    assert RunOptions(**given).saves == saves


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"save_every": "often"}, "--save-every often is not a duration"),
        ({"save_every": "-5"}, "--save-every -5: must be at least 1"),
        ({"save_every": "0s"}, "--save-every 0s is not a duration"),
    ],
)
def test_a_time_or_a_size_that_is_none_is_refused(given: Any, says: str) -> None:
    with pytest.raises(UsageError) as caught:
        RunOptions(**given)
    assert says in str(caught.value)


def test_a_field_of_the_plan_is_set_once() -> None:
    with pytest.raises(UsageError, match="accumulate is set twice, the second time by 'accumulate = 3'"):
        RunOptions(settings=("accumulate=2", "accumulate = 3")).plan_on(1)


def test_a_plan_file_that_is_not_there_is_refused_at_once() -> None:
    with pytest.raises(PlanError, match=r"nowhere\.toml: no plan can be read"):
        RunOptions(plan="nowhere.toml")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (RunOptions(batch_size=3), "--batch-size 3: this option works only for jobs, but train.py is a script"),
        (RunOptions(seed=0), "--seed 0"),
        (RunOptions(args={"lr": 1}), "--arg lr=1: this option works only for jobs, but train.py is a script"),
        (RunOptions(resume="runs/a"), "--resume runs/a"),
    ],
)
def test_a_script_has_no_options_of_jobs(
    options: RunOptions, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").touch()
    with pytest.raises(UsageError, match=words):
        check_script("train.py", options)


def test_a_script_that_is_not_there_is_refused() -> None:
    with pytest.raises(UsageError, match=r"none\.py: no such file"):
        check_script("none.py", RunOptions())


def test_a_script_has_these_options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").touch()
    options = RunOptions("train.py", devices="2xcpu", settings=("shard=2",), out="here", nnodes=2)
    check_script("train.py", options)


def test_run_shows_its_options_to_people_and_to_editors() -> None:
    shown = inspect.signature(mw.run)
    assert list(shown.parameters)[:3] == ["job", "devices", "epochs"]
    assert shown.parameters["epochs"].annotation == (int | None) and shown.parameters["job"].default is None
    help_text = inspect.getdoc(mw.run) or ""
    for name, _, option in options_of(RunOptions):
        assert name in shown.parameters and f"{name}: {option.help}." in help_text


@pytest.mark.slow
def test_a_type_checker_refuses_a_wrong_option_of_run(processes: None, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import meshwise as mw\n"
        'mw.run("mlp", epochs=3, plan=mw.Plan(data=2))\n'
        'mw.run(resume="runs/a")\n'
        'mw.run("mlp", epochs="3")\n'
        'mw.run("mlp", epoch=3)\n'
        'reveal_type(mw.run("mlp"))\n'
    )
    command = [sys.executable, "-m", "mypy", "--strict", str(program)]
    shown = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[3]).stdout
    lines = [line.partition(": ")[2] for line in shown.splitlines() if "program.py:" in line]
    errors = [line for line in lines if line.startswith("error")]
    assert len(errors) == 2, shown
    assert 'Argument "epochs" to "run" has incompatible type "str"' in errors[0]
    assert 'Unexpected keyword argument "epoch"' in errors[1] and "RunSummary" in lines[-1]
