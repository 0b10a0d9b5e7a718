"""What a run leaves: everything that its folder promises, readable by others."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file

from meshwise.reports.read import read_timeline
from meshwise.reports.spans import KINDS
from meshwise.spec.plan import Plan
from meshwise.spec.plan_file import plan_from_toml
from meshwise.training.jobs.mnist import mnist_mlp


@pytest.fixture
def ran(mnist_run: tuple[Path, str, str]) -> tuple[Path, dict[str, object], str]:
    """Its folder, its JSON summary, what it showed beside it."""
    folder, shown, beside = mnist_run
    return folder, json.loads(shown), beside


def test_the_summary_is_that_of_the_folder(ran: tuple[Path, dict[str, object], str]) -> None:
    folder, summary, _ = ran
    assert summary == json.loads((folder / "summary.json").read_text())
    assert summary["metrics"]["accuracy"] > 0.8 and summary["status"] == "finished"  # type: ignore[index]
    for phases in summary["phases"]:  # type: ignore[attr-defined]
        assert {"data", "forward", "backward", "communication", "optimizer", "evaluate"} <= phases.keys()


def test_the_plain_lines_have_the_tutorials_facts(ran: tuple[Path, dict[str, object], str]) -> None:
    assert "epoch 1/1  step 20/60  loss " in ran[2] and " samples/s" in ran[2] and "\x1b" not in ran[2]


def test_every_step_has_its_loss_and_every_epoch_its_accuracy(ran: tuple[Path, dict[str, object], str]) -> None:
    records = [json.loads(line) for line in (ran[0] / "metrics.jsonl").read_text().splitlines()]
    assert [r["step"] for r in records if "loss" in r] == list(range(1, 61))
    assert records[-1]["test"].keys() == {"accuracy"}


def test_job_plan_versions_spans_output_and_events_are_there(ran: tuple[Path, dict[str, object], str]) -> None:
    folder = ran[0]
    run = json.loads((folder / "run.json").read_text())
    assert run["status"] == "finished" and run["job"] == "mnist-mlp" and "torch" in run["versions"]
    assert plan_from_toml((folder / "plan.toml").read_text()) == Plan(data=2)
    for rank in (0, 1):
        spans = read_timeline(folder).of_rank(rank)
        assert {"forward", "backward", "communication", "optimizer"} <= {KINDS[kind] for kind in spans["kind"]}
        assert set(range(1, 61)) <= set(spans["step"].tolist())
        assert (folder / "workers" / f"rank{rank}.log").exists()
    pytest.importorskip("tensorboard")
    assert list((folder / "tensorboard").iterdir())


def test_the_weights_load_in_plain_pytorch(ran: tuple[Path, dict[str, object], str]) -> None:
    mnist_mlp().model().load_state_dict(load_file(ran[0] / "weights.safetensors"))
