"""The log of a rank: nothing is lost on its way, and a log that is cut off, damaged or foreign still gives a report."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from meshwise.records.folder import begin_session, end_session, read_run, span_log, write_run
from meshwise.reports.advice import TRY, advised
from meshwise.reports.analyse import report_of
from meshwise.reports.read import read_timeline
from meshwise.reports.recorder import WIDTH, Recorder
from meshwise.reports.span_log import SpanLog
from meshwise.reports.spans import KINDS, QUANTUM, as_rows, pack, unpack
from meshwise.reports.views.html_page import report_dict
from meshwise.reports.views.report_text import report_text
from tests.reports.views.reports import printed

HUGE = 2**62


@given(
    st.lists(
        st.tuples(
            st.integers(0, 300),
            st.integers(0, HUGE),
            st.integers(0, 10**12),
            st.integers(0, 2**31 - 1),
            st.integers(0, HUGE),
            st.integers(-1, 2**40),
        ),
        max_size=60,
    )
)
def test_spans_come_back_as_they_were_packed(spans: list[tuple[int, ...]]) -> None:
    flat = [value for code, start, long, *rest in spans for value in (code, start, start + long, *rest)]
    columns = unpack(pack(as_rows(flat)), len(spans))
    rows = as_rows(flat)
    for at, column in enumerate(columns):
        expected = rows[:, at] // QUANTUM * QUANTUM if at in (1, 2) else rows[:, at]
        assert column.tolist() == expected.tolist()


@given(st.integers(0, 10**6), st.data())
def test_damaged_text_is_told_and_never_read_as_something_else(seed: int, data: st.DataObject) -> None:
    random = np.random.default_rng(seed)
    text = pack(random.integers(0, 10**6, (20, WIDTH)))
    at = data.draw(st.integers(0, len(text) - 1))
    changed = text[:at] + data.draw(st.sampled_from("ABCabc019+/")) + text[at + 1 :]
    try:
        columns = unpack(changed, 20)
    except ValueError:
        return
    # base64 has spare bits at its end: a change there changes nothing
    assert [c.tolist() for c in columns] == [c.tolist() for c in unpack(text, 20)]


def write_log(
    folder: Path,
    rank: int = 0,
    world: int = 1,
    steps: int = 12,
    *,
    close: bool = True,
    attempt: int = 0,
    program: str = "",
    divided: str = "",
) -> Recorder:
    """A log of some steps, by the recorder and the thread that runs write in."""
    recorder = Recorder()
    recorder.program, recorder.divided = program, divided
    head = {"rank": rank, "world": world, "device": "cpu", "host": "here"}
    head |= {"attempt": attempt} if attempt else {}
    log = SpanLog(span_log(folder, rank, attempt or 1), recorder, head)
    for step in range(1, steps + 1):
        recorder.begin_step(step)
        for kind in ("data", "forward", "backward", "optimizer"):
            with recorder.span(kind):
                time.sleep(0.0005)
        recorder.count("loss", torch.tensor(1.0 / step))
        recorder.samples += 8
    if close:
        log.close("finished")
    else:
        log._write(log._lines())
        log._closed.set()
    return recorder


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run folder of one rank."""
    begin_session(tmp_path, time.time(), job="logged", devices=["cpu"])
    write_log(tmp_path)
    end_session(tmp_path, "finished")
    return tmp_path


def test_what_was_recorded_is_read_back(run: Path) -> None:
    timeline = read_timeline(run)
    assert timeline.missing == () and len(timeline.spans) == 48
    assert [KINDS[kind] for kind in timeline.spans["kind"][:4]] == ["data", "forward", "backward", "optimizer"]
    assert timeline.spans["step"].tolist() == [step for step in range(1, 13) for _ in range(4)]
    (loss,) = [counter for counter in timeline.counters if counter.name == "loss"]
    assert loss.value.tolist() == pytest.approx([1 / step for step in range(1, 13)])
    report = report_of(timeline, str(run))
    assert report.steps == 12 and report.status == "finished" and report.ranks[0].complete
    assert report.samples_per_second == pytest.approx(96 / sum(report.kinds.values()), rel=1e-6)
    assert json.loads(json.dumps(report_dict(report)))["steps"] == 12


@pytest.mark.parametrize(
    ("program", "word"),
    [("", "mw.accumulate"), ("trainer", "gradient_accumulation_steps"), ("lightning", "accumulate_grad_batches")],
)
def test_advice_inside_a_trainer_is_in_its_words(tmp_path: Path, program: str, word: str) -> None:
    begin_session(tmp_path, time.time(), job="logged", devices=["cpu"])
    write_log(tmp_path, program=program)
    kind = read_timeline(tmp_path).facts["program"]
    assert kind == (program or "script") and word in advised(TRY["slower"], kind)


def test_the_report_says_how_far_the_whole_view_divides_the_work(run: Path) -> None:
    assert "divided" not in report_of(read_timeline(run)).about
    write_log(run, divided="97% of the operators")
    report = report_of(read_timeline(run))
    assert report.about["divided"] == "97% of the operators"
    assert "divided  97% of the operators" in printed(report_text(report))


@given(share=st.floats(0, 1))
def test_a_log_cut_off_anywhere_gives_a_report_that_says_so(share: float, cut: Callable[[float], Path]) -> None:
    folder = cut(share)
    timeline = read_timeline(folder)
    report = report_of(timeline)
    assert report_dict(report)["verdict"]
    whole = len((folder / "whole").read_bytes())
    if int(whole * share) < whole - 2:
        assert any("rank 0" in sentence and "cut off" in sentence for sentence in timeline.missing)


@pytest.fixture(scope="module")
def cut(tmp_path_factory: pytest.TempPathFactory) -> Callable[[float], Path]:
    """`cut(0.5)`: a run folder whose only log ends in its middle."""
    folder = tmp_path_factory.mktemp("cut")
    begin_session(folder, time.time(), job="cut", devices=["cpu"])
    write_log(folder)
    end_session(folder, "failed", "rank 0 was killed")
    whole = span_log(folder, 0).read_bytes()
    (folder / "whole").write_bytes(whole)

    def of(share: float) -> Path:
        span_log(folder, 0).write_bytes(whole[: int(len(whole) * share)])
        return folder

    return of


def test_a_killed_worker_is_named_with_the_step_it_was_in(tmp_path: Path) -> None:
    begin_session(tmp_path, time.time(), job="killed", devices=["cpu"] * 2)
    write_log(tmp_path, 0, world=2)
    write_log(tmp_path, 1, world=2, steps=7, close=False)
    end_session(tmp_path, "failed", "rank 1 was killed by SIGKILL")
    report = report_of(read_timeline(tmp_path))
    said = "rank 1 was cut off in step 7: no end was recorded, and up to a second of the log is lost."
    assert report.missing == [said]
    assert report.verdict.startswith("The run failed: rank 1 was killed by SIGKILL. Until then: ")
    assert [rank.complete for rank in report.ranks] == [True, False] and report.ranks[1].steps == 7


def test_ranks_that_never_started_are_named(tmp_path: Path) -> None:
    begin_session(tmp_path, time.time(), job="absent", devices=["cpu"] * 4)
    write_log(tmp_path, 1, world=4)
    end_session(tmp_path, "failed", "x")
    (sentence,) = report_of(read_timeline(tmp_path)).missing
    assert sentence.startswith("ranks 0, 2, 3 of 4 left no log. Either they never started, or they ran on another")


def test_a_run_without_any_log_still_has_a_report(tmp_path: Path) -> None:
    begin_session(tmp_path, time.time() - 5, job="early", devices=["cpu"] * 2)
    end_session(tmp_path, "failed", "no job named x")
    report = report_of(read_timeline(tmp_path))
    assert "no rank has a log here" in report.missing[0] and report.verdict.startswith(
        "The run failed: no job named x."
    )
    assert report.wall_seconds == pytest.approx(5, abs=1) and sum(p.share for p in report.goodput) == pytest.approx(1)


@pytest.mark.parametrize("line", ['{"log": 3, "rank": 0}', '{"kind": "forward", "start": 1, "end": 2, "step": 1}'])
def test_a_log_of_another_version_is_left_out_and_named(run: Path, line: str) -> None:
    path = span_log(run, 0)
    path.write_text(line + "\n" + '{"spans": 3, "data": "?"}\n')
    report = report_of(read_timeline(run))
    assert "another version of meshwise" in report.missing[0] and report.steps == 0
    assert report.verdict == "No step was recorded, so it is unknown what limits a step."


@pytest.mark.parametrize("line", ["[1, 2]", '"text"', "7", '{"spans": "x", "data": 3}', '{"counters": [[1]]}', "{"])
def test_lines_that_are_none_of_ours_are_counted_or_skipped(run: Path, line: str) -> None:
    path = span_log(run, 0)
    first, *rest = path.read_text().splitlines()
    path.write_text("\n".join([first, line, *rest]) + "\n")
    timeline = read_timeline(run)
    assert len(timeline.spans) == 48
    assert all("damaged line" in sentence for sentence in timeline.missing)


def test_a_damaged_block_is_left_out_and_told(run: Path) -> None:
    path = span_log(run, 0)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    (block,) = [line for line in lines if "spans" in line]
    block["data"] = block["data"][:-8]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert read_timeline(run).missing[0].startswith("rank 0: its log has 1 damaged line, left out here")


@pytest.mark.parametrize("first", ["", '{"log": 2, "rank": null}'])
def test_a_session_whose_first_line_is_damaged_is_not_taken_for_the_one_before(run: Path, first: str) -> None:
    path = span_log(run, 0)
    whole, lines = read_timeline(run), path.read_text().splitlines()
    path.write_text("\n".join([*lines, first or lines[0][:20], *lines[1:]]) + "\n")
    timeline = read_timeline(run)
    assert len(timeline.spans) == len(whole.spans)
    assert any(", left out here" in sentence for sentence in timeline.missing)


def test_a_log_that_cannot_be_written_ends_the_timeline_and_not_the_run(tmp_path: Path) -> None:
    said: list[str] = []
    span_log(tmp_path, 0).mkdir(parents=True)
    recorder = Recorder()
    log = SpanLog(span_log(tmp_path, 0), recorder, {"rank": 0, "world": 1}, failed=said.append)
    with recorder.span("forward"):
        pass
    log.close("finished")
    assert not recorder.on and len(said) == 1 and "cannot be written" in said[0] and "The run continues" in said[0]


def test_a_run_that_was_gone_on_with_is_one_timeline(tmp_path: Path) -> None:
    begun = time.time()
    for steps in (9, 12):  # the second session does steps 1 to 9 again
        begin_session(tmp_path, time.time(), job="resumed", devices=["cpu"])
        write_log(tmp_path, steps=steps)
        end_session(tmp_path, "stopped" if steps == 9 else "finished")
    timeline = read_timeline(tmp_path)
    assert len(timeline.sessions) == 2 and timeline.sessions[1].began == pytest.approx(
        (time.time() - begun) * 1e9, rel=1
    )
    report = report_of(timeline)
    assert report.steps == 12 and report.ranks[0].steps == 12
    parts = {part.name: part.seconds for part in report.goodput}
    assert parts["lost"] > 9 * 4 * 0.0005 and sum(parts.values()) == pytest.approx(report.wall_seconds)
    assert report.wall_seconds < time.time() - begun + 0.1


def test_what_a_rank_records_after_a_later_attempt_began_does_not_count(tmp_path: Path) -> None:
    for ago in (20, 10):
        begin_session(tmp_path, time.time() - ago, job="cut off", devices=["cpu"])
    write_log(tmp_path, steps=9, attempt=1)  # its machine came back too late
    write_log(tmp_path, steps=3, attempt=2)
    end_session(tmp_path, "finished")
    timeline = read_timeline(tmp_path)
    assert timeline.spans["step"].max() == 3 and len(timeline.spans) == 12
    assert [path.name for path in sorted((tmp_path / "spans").iterdir())] == ["rank0.2.jsonl", "rank0.jsonl"]


def test_days_between_two_sessions_are_no_part_of_the_run(tmp_path: Path) -> None:
    for _ in range(2):
        begin_session(tmp_path, time.time(), job="resumed", devices=["cpu"])
        write_log(tmp_path, steps=3)
        end_session(tmp_path, "stopped")
    run, path = read_run(tmp_path), span_log(tmp_path, 0)
    for session in run["sessions"][:1]:
        session["began"] -= 2 * 86400
        session["ended"] -= 2 * 86400
    write_run(tmp_path, run)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    lines[0]["unix"] -= 2 * 86400
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    report = report_of(read_timeline(tmp_path))
    assert report.wall_seconds < 10 and sum(part.seconds for part in report.goodput) == pytest.approx(
        report.wall_seconds
    )
    assert report.ranks[0].seconds["idle"] < 1


def test_a_run_whose_launcher_was_killed_is_not_running_for_ever(tmp_path: Path) -> None:
    begin_session(tmp_path, time.time() - 700, job="killed", devices=["cpu"])
    write_log(tmp_path, close=False)
    path = span_log(tmp_path, 0)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    lines[0]["unix"] -= 600
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    missing = read_timeline(tmp_path).missing
    assert "nothing was recorded for 10 min" in missing[0] and "rank 0 was cut off in step 12" in missing[1]
