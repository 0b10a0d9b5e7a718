"""What a notebook shows of results, reports, proofs, machines and errors, and the records of a launch.

Of terminal/notebook.py too.
"""

from __future__ import annotations

import html
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from IPython.core.interactiveshell import InteractiveShell
from jupyter_client import KernelManager

import meshwise as mw
from meshwise import launcher, reports
from meshwise.records.folder import read_run
from meshwise.spec.errors import UsageError, WorkerFailed

OLD = Path(__file__).parents[1] / "old" / "runs"


def shown(value: Any) -> str:
    """The text of what a notebook draws."""
    drawn = value._repr_html_()
    assert drawn.startswith("<pre") and "\x1b" not in drawn
    return html.unescape(re.sub(r"<[^>]*>", "", drawn))


def test_a_machine_is_its_table() -> None:
    text = shown(mw.find_machine("8xH100"))
    assert "H100" in text and "Machine(" not in text


def test_a_report_is_the_report_of_the_terminal() -> None:
    report = mw.report(OLD / "finished")
    text = shown(report)
    assert report.title in text and "forward" in text and "Report(" not in text
    assert shown(reports.report.compare(OLD / "finished", OLD / "shard")).count("backward") >= 1


def test_a_figure_is_the_page_of_a_report_in_a_frame() -> None:
    report = mw.report(OLD / "finished")
    drawn = report.figure()._repr_html_()
    (page,) = re.findall(r'<iframe srcdoc="([^"]*)"', drawn)
    assert html.unescape(page).startswith("<!doctype html>") and report.title in page and "\n" in page
    assert len(repr(report.figure())) < 100


def test_a_summary_is_what_a_run_ends_with_and_leads_to_its_report() -> None:
    phases = ({"forward": 1.0, "backward": 2.0},)
    summary = mw.RunSummary(
        job="mine",
        plan="Plan(data=1)",
        devices=("cpu",),
        status="finished",
        epochs=1,
        steps=10,
        samples=100,
        seconds=4.0,
        train_seconds=3.0,
        samples_per_second=33.0,
        metrics={"accuracy": 0.5},
        phases=phases,
        memory=(None,),
        folder=str(OLD / "finished"),
        notes=(),
    )
    assert mw.run is launcher.run.run  # whose file says how a summary is shown
    assert "accuracy 50.00 %" in shown(summary) and "RunSummary(" not in shown(summary)
    assert mw.report(summary).folder == summary.folder


def test_everything_that_a_verb_returns_is_drawn() -> None:
    verbs = [mw.run, mw.check, mw.bench, mw.report, mw.find_machine]
    assert all(map(callable, verbs))
    kinds: list[Any] = [mw.RunSummary, mw.Proof, mw.Bench, mw.Report, mw.Machine]
    assert [kind.__name__ for kind in kinds if not hasattr(kind, "_repr_html_")] == []


@pytest.mark.parametrize("error", [UsageError("one. Use two."), WorkerFailed("rank 1 of 2 failed: ValueError: no")])
def test_an_error_is_its_sentence_without_our_lines(error: Exception, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        raise error
    except type(error):
        InteractiveShell.instance().showtraceback()
    assert capsys.readouterr().out.strip() == f"{type(error).__name__}: {error}"


def _fails() -> None:
    raise ValueError("mine")


def test_a_launch_keeps_records_where_it_is_told_to(processes: None, tmp_path: Path) -> None:
    assert mw.launch(int, "7", devices="1xcpu", out=tmp_path) == [7]
    (folder,) = tmp_path.iterdir()
    facts = read_run(folder)
    assert (facts["status"], facts["job"], facts["world"]) == ("finished", "int", 1)
    assert mw.report(folder).status == "finished"
    with pytest.raises(WorkerFailed):
        mw.launch(_fails, devices="1xcpu", out=tmp_path / "failed")
    (folder,) = (tmp_path / "failed").iterdir()
    assert read_run(folder)["status"] == "failed" and "ValueError: mine" in read_run(folder)["error"]


SLEEPERS = """
import os, pathlib, time
import meshwise as mw
def sleep():
    pathlib.Path(f"{os.getpid()}.rank").touch()
    time.sleep(600)
mw.launch(sleep, devices="2xcpu")
"""


def test_interrupting_a_cell_ends_all_ranks(processes: None, tmp_path: Path) -> None:
    kernel = KernelManager(kernel_name="python3")
    kernel.start_kernel(cwd=str(tmp_path))
    client = kernel.blocking_client()
    client.start_channels()
    try:
        client.wait_for_ready(timeout=60)
        asked = client.execute(SLEEPERS)
        wait_until(lambda: len(list(tmp_path.glob("*.rank"))) == 2)
        ranks = [int(path.stem) for path in tmp_path.glob("*.rank")]
        kernel.interrupt_kernel()
        replies = iter(lambda: client.get_shell_msg(timeout=60), None)  # of what asked whether it is ready, too
        reply = next(reply for reply in replies if reply["parent_header"]["msg_id"] == asked)
        assert reply["content"]["ename"] == "KeyboardInterrupt"
        wait_until(lambda: not any(map(psutil.pid_exists, ranks)))
    finally:
        client.stop_channels()
        kernel.shutdown_kernel(now=True)


def wait_until(true: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not true():
        assert time.monotonic() < end
        time.sleep(0.05)
