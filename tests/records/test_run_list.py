"""Runs in short: what is read of good, damaged and foreign folders."""

from __future__ import annotations

import json
import os
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from meshwise.records.folder import keep_metrics, newest_run
from meshwise.records.metrics import Metrics
from meshwise.records.run_list import find_run, run_entry, run_list
from meshwise.spec.errors import UsageError


def made(parent: Path, name: str, run: Any = None, metrics: str = "", plan: str = "") -> Path:
    folder = parent / name
    folder.mkdir(parents=True)
    facts = {"job": "gpt", "status": "finished", "started": "2026-11-21T10:00:00+00:00"} if run is None else run
    (folder / "run.json").write_text(facts if isinstance(facts, str) else json.dumps(facts))
    if metrics:
        (folder / "metrics.jsonl").write_text(metrics)
    if plan:
        (folder / "plan.toml").write_text(plan)
    return folder


def test_the_metric_is_the_first_of_the_tests_and_its_best_depends_on_its_name(tmp_path: Path) -> None:
    lines = [{"loss": 9.0}, {"test": {"accuracy": 0.9, "nats": 3}}, {"test": {"accuracy": 0.8, "nats": 2}}]
    entry = run_entry(made(tmp_path, "a", metrics="\n".join(map(json.dumps, lines))))
    assert (entry.metric, entry.last, entry.best) == ("accuracy", 0.8, 0.9)
    lines = [{"loss": 3.0}, {"loss": 1.0}, {"loss": float("nan")}, {"loss": 2.0}]
    entry = run_entry(made(tmp_path, "b", metrics="\n".join(map(json.dumps, lines))))
    assert (entry.metric, entry.last, entry.best) == ("loss", 2.0, 1.0)


def test_plan_time_and_size(tmp_path: Path) -> None:
    sessions = [{"began": 10.0, "ended": 15.5}, {"began": 100.0, "ended": 101.0}]
    facts = {"job": "gpt", "status": "stopped", "sessions": sessions}
    folder = made(tmp_path, "a", facts, plan="shard = 2\nprecision = 'bf16'\n")
    (folder / "checkpoint").mkdir()
    (folder / "checkpoint" / "state.pt").write_bytes(b"x" * 1000)
    entry = run_entry(folder)
    assert (entry.plan, entry.seconds, entry.status) == ("shard=2, precision='bf16'", 6.5, "stopped")
    assert entry.size == 1000 + sum((folder / name).stat().st_size for name in ("run.json", "plan.toml"))


def test_a_run_that_has_not_begun_stands_where_it_was_sent(tmp_path: Path) -> None:
    sent = datetime(2026, 11, 21, 12, tzinfo=UTC).timestamp()
    for name, at in (("a", sent + 9), ("b", sent)):
        made(tmp_path, name, {"job": "gpt", "status": "queued", "submission": {"sent": at}})
    made(tmp_path, "c")  # began at ten
    assert [entry.name for entry in run_list(tmp_path)] == ["c", "b", "a"]
    assert newest_run(tmp_path).name == "c" and newest_run(tmp_path, queued=True).name == "a"


def test_what_a_job_or_a_script_was_given(tmp_path: Path) -> None:
    of_job = {"job": "gpt", "request": {"job": "gpt", "args": ["lr=3e-4", "name=a b"]}, "arguments": ["no"]}
    assert run_entry(made(tmp_path, "a", of_job)).args == "lr=3e-4 'name=a b'"
    assert run_entry(made(tmp_path, "b", {"job": "train.py", "arguments": ["--lr", "0.1"]})).args == "--lr 0.1"
    assert run_entry(made(tmp_path, "c", {"job": "gpt", "request": {"job": "gpt"}})).args == ""


@pytest.mark.parametrize(
    "run",
    [
        "",
        "{",
        "[]",
        "null",
        {},
        {"job": 3, "status": None, "started": 7, "sessions": 5},
        {"sessions": [1, {"began": "x", "ended": []}, {}], "status": ["finished"]},
    ],
)
def test_a_damaged_record_is_listed_and_raises_nothing(tmp_path: Path, run: Any) -> None:
    made(tmp_path, "bad", run, metrics='{"loss": "x"}\n{"test": []}\n[]\n{"test": {"a": {}}}\n{"lo', plan="= nonsense")
    (entry,) = run_list(tmp_path)
    assert entry.name == "bad" and entry.last is None and entry.seconds is None and entry.plan == ""


def test_a_run_json_that_is_no_file_is_no_run_that_can_be_read(tmp_path: Path) -> None:
    (tmp_path / "folder" / "run.json").mkdir(parents=True)
    (tmp_path / "pipe").mkdir()
    for name in ("run.json", "metrics.jsonl", "plan.toml"):
        os.mkfifo(tmp_path / "pipe" / name)
    assert [entry.status for entry in run_list(tmp_path)] == ["unreadable", "unreadable"]


def test_folders_of_others_are_left_out_and_runs_are_in_the_order_in_which_they_began(tmp_path: Path) -> None:
    made(tmp_path, "a", {"started": "2026-11-22"})
    made(tmp_path, "z", {"started": "2026-11-21"})
    (tmp_path / "pictures").mkdir()
    (tmp_path / "notes.txt").write_text("run.json")
    assert [entry.name for entry in run_list(tmp_path)] == ["z", "a"]
    assert run_list(tmp_path / "nowhere") == [] and run_list(tmp_path / "notes.txt") == []


def test_a_run_is_named_by_its_name_a_part_of_it_or_its_path(tmp_path: Path) -> None:
    one, two = made(tmp_path, "1121-gpt"), made(tmp_path, "1122-gpt")
    assert find_run(tmp_path, "1121-gpt") == find_run(tmp_path, "1121") == find_run(tmp_path, str(one)) == one
    assert find_run(tmp_path, "1122") == two
    for word, said in {
        "gpt": "part of the names of 2 runs",
        "1123-gpt": "Did you mean '112",
        "": "empty",
        "mlp": "there is no run mlp in",
    }.items():
        with pytest.raises(UsageError, match=said):
            find_run(tmp_path, word)


def test_metrics_are_read_on_from_where_the_last_look_ended(tmp_path: Path) -> None:
    folder, path = made(tmp_path, "a"), tmp_path / "a" / "metrics.jsonl"
    metrics = Metrics(folder)
    metrics.read_on()
    assert metrics.by_name() == {} and metrics.offset == 0
    path.write_text('{"step": 1, "loss": 4.0}\n{"step": 2, "lo')
    metrics.read_on()
    assert metrics.losses == {1: 4.0} and metrics.offset == len('{"step": 1, "loss": 4.0}\n')
    with path.open("a") as file:
        file.write('ss": 3.0}\n{"epoch": 1, "test": {"accuracy": 0.5}}')
    metrics.read_on()
    metrics.read_on()
    assert metrics.by_name() == {"accuracy": [0.5], "loss": [4.0, 3.0]} and metrics.offset == path.stat().st_size
    with path.open("r+b") as file:  # what was read is not read again
        file.write(b"x" * 10)
    metrics.read_on()
    assert metrics.by_name()["loss"] == [4.0, 3.0]


def test_metrics_of_a_file_that_was_written_anew_are_read_anew(tmp_path: Path) -> None:
    folder, path = made(tmp_path, "a", metrics='{"step": 1, "loss": 4.0}\n{"step": 2, "loss": 3.0}\n'), tmp_path / "a"
    metrics = Metrics(folder)
    metrics.read_on()
    keep_metrics(path, 1, lambda record: record["step"] < 2)
    metrics.read_on()
    assert metrics.losses == {1: 4.0}
