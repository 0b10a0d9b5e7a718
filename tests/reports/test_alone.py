"""A run on several devices is compared with an earlier run of the same program on one, where there is one."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import pytest

import meshwise
from meshwise.records.folder import begin_session, end_session, read_run, source_of, span_log, write_run
from meshwise.reports.expected import measured_alone
from meshwise.reports.read import read_timeline
from meshwise.reports.recorder import Recorder
from meshwise.reports.report import report
from meshwise.reports.span_log import SpanLog

MS = 1_000_000


def made(folder: Path, world: int, step_ms: float, *, batch: int = 8, host: str = "here", **facts: Any) -> Path:
    """A finished run whose steps take so long."""
    known = {"job": "x", "source": "digest", "request": {"job": "x"}, "world": world, "devices": ["cpu"] * world}
    begin_session(folder, time.time(), **known | facts)
    for rank in range(world):
        now = [0]
        recorder = Recorder(clock=partial(now.__getitem__, 0))
        log = SpanLog(span_log(folder, rank), recorder, {"rank": rank, "world": world, "device": "cpu", "host": host})
        for step in range(1, 21):
            recorder.begin_step(step)
            for kind in ("forward", "backward"):
                with recorder.span(kind):
                    now[0] += int(step_ms * MS / 2)
            recorder.samples += batch
        log.close("finished")
    end_session(folder, "finished")
    return folder


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    parent = tmp_path_factory.mktemp("runs")
    made(parent / "b-two", 2, 12.0)
    yield parent


def test_an_earlier_run_on_one_device_says_that_two_are_slower(runs: Path) -> None:
    """By the estimate nothing can be said: two devices compute alike, so one needs 12 ms to 24 ms."""
    one, two = made(runs / "a-one", 1, 10.0), runs / "b-two"
    found = measured_alone(read_timeline(two), two)
    assert found is not None and found.run == str(one) and found.seconds == pytest.approx(0.010, rel=1e-3)
    finding = report(two).findings[0]
    assert finding.headline == "2 devices are slower than one."
    assert finding.sentence == (
        f"2 devices are slower than one: a step takes 12 ms, and one device took 10 ms (measured in {one})."
    )
    write_run(one, read_run(one) | {"source": "another"})
    assert report(two).findings[0].kind != "slower"


@pytest.mark.parametrize(
    ("step_ms", "different"),
    [
        (13.0, {}),
        (11.8, {}),
        (10.0, {"source": "edited since"}),
        (10.0, {"source": None}),
        (10.0, {"host": "elsewhere"}),
        (10.0, {"devices": ["cuda:0"]}),
        (10.0, {"arguments": ["--width", "2"]}),
        (10.0, {"request": {"job": "x", "batch_size": 16}}),
        (10.0, {"request": {"job": "x", "args": ["lr=1"]}}),
        (10.0, {"batch": 16}),
        (10.0, {"world": 2}),
    ],
)
def test_a_run_that_was_not_faster_or_of_other_work_says_nothing(
    tmp_path: Path, step_ms: float, different: dict[str, Any]
) -> None:
    made(tmp_path / "one", **{"world": 1, "step_ms": step_ms} | different)
    two = made(tmp_path / "two", 2, 12.0)
    assert report(two).findings[0].kind != "slower"


def test_the_plan_counts_but_for_how_it_divides_the_work(tmp_path: Path) -> None:
    one, two = made(tmp_path / "one", 1, 10.0), made(tmp_path / "two", 2, 12.0)
    (two / "plan.toml").write_text("data = 2\nzero1 = true\n")
    assert report(two).findings[0].kind == "slower"
    (one / "plan.toml").write_text('precision = "bf16"\n')
    assert report(two).findings[0].kind != "slower"


def test_a_source_is_the_digest_of_a_file_or_the_version(tmp_path: Path) -> None:
    file = tmp_path / "train.py"
    file.write_text("a = 1\n")
    first = source_of(str(file))
    assert first == source_of(f"{file}:job") and len(first) == 12
    file.write_text("a = 2\n")
    assert source_of(str(file)) != first
    assert source_of("gpt:tiny") == source_of("mnist-mlp") and source_of("mnist-mlp").startswith("meshwise ")


def test_the_version_is_known_where_the_package_is_found_by_pythonpath_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def not_installed(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr("importlib.metadata.version", not_installed)
    monkeypatch.setattr("meshwise.records.folder.version", not_installed)
    assert source_of("mnist-mlp") == f"meshwise {meshwise.__version__}"
