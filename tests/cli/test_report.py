"""`meshwise report` on a real run: every form of it, the same numbers in all, and a sentence for what cannot be."""

from __future__ import annotations

import gzip
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from meshwise.spec.units import seconds_text

Report = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(mnist_run: tuple[Path, str, str]) -> Path:
    return mnist_run[0]


@pytest.fixture
def report(command: Report) -> Report:
    """`report("RUN", "--json")`: exit code, stdout, stderr."""
    return partial(command, "report")


def test_one_screen_has_the_verdict_every_device_and_a_step(run: Path, report: Report) -> None:
    code, shown, _ = report(run)
    plain = json.loads(report(run, "--json")[1])
    assert code == 0 and "mnist-mlp finished" in shown and "rank 0" in shown and "rank 1" in shown
    assert plain["verdict"].split(":")[0] in shown and seconds_text(plain["step_seconds"]) in shown
    assert all(len(line) <= 80 for line in shown.splitlines())
    assert plain["steps"] == 60 and plain["missing"] == []
    assert sum(part["share"] for part in plain["goodput"]) == pytest.approx(1)


def test_the_summary_of_the_run_has_the_numbers_of_its_report(run: Path, report: Report) -> None:
    plain, summary = json.loads(report(run, "--json")[1]), json.loads((run / "summary.json").read_text())
    assert summary["verdict"] == plain["verdict"] and summary["samples_per_second"] == plain["samples_per_second"]
    assert summary["phases"] == [rank["seconds"] for rank in plain["ranks"]]


def test_files_are_written_into_the_run_or_where_they_are_wanted(run: Path, report: Report, tmp_path: Path) -> None:
    code, shown, _ = report(run, "--html", "--trace", "--to", tmp_path / "new")
    assert code == 0 and shown.count("written  ") == 2
    trace = json.loads(gzip.decompress((tmp_path / "new" / "trace.json.gz").read_bytes()))
    assert any(event["ph"] == "X" for event in trace["traceEvents"])
    assert (tmp_path / "new" / "report.html").stat().st_size > 10**6
    assert report(run, "--trace")[0] == 0 and (run / "trace.json.gz").exists()


def test_mermaid_is_printed_alone(run: Path, report: Report) -> None:
    code, shown, _ = report(run, "--mermaid")
    assert code == 0 and shown.startswith("gantt\n") and "section rank 1" in shown


def test_steps_are_chosen(run: Path, report: Report) -> None:
    (view,) = json.loads(report(run, "--steps", "3:4", "--json")[1])["views"]
    assert (view["name"], view["first_step"], view["last_step"]) == ("chosen", 3, 4)
    assert {bar["step"] for bar in view["bars"]} == {3, 4}


def test_two_runs_are_compared(run: Path, report: Report, tmp_path: Path) -> None:
    shutil.copytree(run, tmp_path / "same")
    code, shown, _ = report(run, tmp_path / "same")
    assert code == 0 and "B / A" in shown
    assert json.loads(report(run, tmp_path / "same", "--json")[1])


def test_without_a_name_the_newest_run_is_meant(run: Path, report: Report, monkeypatch: pytest.MonkeyPatch) -> None:
    (run.parent / "runs").mkdir(exist_ok=True)
    if not (run.parent / "runs" / run.name).exists():
        shutil.copytree(run, run.parent / "runs" / run.name)
    monkeypatch.chdir(run.parent)
    assert json.loads(report("--json")[1])["folder"] == str(Path("runs") / run.name)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["nowhere"], "there is no run nowhere in runs/"),
        (["RUN", "nowhere"], "there is no run nowhere in runs/"),
        (["RUN", "--steps", "b"], "--steps must be the first and the last step, such as 100:110, but it is b"),
        (["RUN", "--steps", "9:3"], "--steps must be the first and the last step, such as 100:110, but it is 9:3"),
        (["RUN", "--steps", "900"], "the run has no steps in this range. It has 1 to 60"),
        (["RUN", "--html", "--to", "FILE"], "cannot be written"),
        (["RUN", "--pdf"], "No such option"),
        (["RUN", "RUN", "--steps", "3"], "compared as text or with --json alone. Leave out RUN2"),
        (["RUN", "--live", "--json"], "--live cannot be combined with other options"),
        (["RUN", "--mermaid", "--json"], "Only one view can print to the terminal. Choose between "),
        (["FILE"], "cannot be read (Not a directory). Name a folder"),
    ],
)
def test_what_cannot_be_is_a_sentence_and_exit_code_2(
    run: Path, report: Report, tmp_path: Path, words: list[str], says: str
) -> None:
    (tmp_path / "file").write_text("")
    places = {"RUN": str(run), "FILE": str(tmp_path / "file")}
    code, _, error = report(*(places.get(word, word) for word in words))
    assert code == 2 and says in error and "Traceback" not in error


@pytest.mark.usefixtures("processes")
def test_a_run_that_was_killed_has_a_report_that_says_who_was_cut_off(report: Report, tmp_path: Path) -> None:
    job = tmp_path / "job.py"
    job.write_text(
        "import os, signal\nimport torch\nimport meshwise as mw\n"
        "def loss(model, batch):\n"
        "    loss.calls += 1\n"
        "    if mw.rank() == 1 and loss.calls == 40: os.kill(os.getpid(), signal.SIGKILL)\n"
        "    return model(batch[0]).mean()\n"
        "loss.calls = 0\n"
        "data = torch.utils.data.TensorDataset(torch.randn(4000, 8))\n"
        "job = mw.Job(name='dies', model=lambda: torch.nn.Linear(8, 1), data=lambda: data, loss=loss, batch_size=20,\n"
        "             optimizer=lambda p: torch.optim.SGD(p, lr=0.1), epochs=1)\n"
    )
    words = ["--devices", "2xcpu", "--restarts", "0", "--out", str(tmp_path / "runs")]
    command = [sys.executable, "-m", "meshwise", "run", f"{job}:job", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=os.environ | {"COLUMNS": "200"})
    assert done.returncode == 1
    (folder,) = (tmp_path / "runs").iterdir()
    code, shown, _ = report(folder, "--json")
    plain = json.loads(shown)
    assert code == 0 and plain["status"] == "failed" and plain["verdict"].startswith("The run failed: rank 1")
    assert any(re.match(r"rank 1 was cut off", sentence) for sentence in plain["missing"])
    assert report(folder)[0] == 0
