"""The Mermaid Gantt chart: in Mermaid's own grammar, with the bars of the report and no others."""

from __future__ import annotations

import dataclasses
import html
import re
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwise.reports.analyse import report_of
from meshwise.reports.run_report import Bar, Report
from meshwise.reports.spans import Timeline
from meshwise.reports.views.gantt_text import MOST_BARS, gantt, render
from meshwise.spec.errors import UsageError
from tests.reports.schedules import Schedule, delayed, even, played

# gantt.jison: what a text may hold, once `#58;` and the like are taken for characters.
TEXT = r"(?:[^#:;%\n{}<>\\\"]|#\d+;)+"
TASK = re.compile(rf"    ({TEXT}) :(?:(crit|active), )?(\d+), (\d+)")


@dataclass
class Chart:
    title: str
    axis: str
    tasks: list[tuple[str, str, str, int, int]]
    """(section, text, tag, start, end)"""
    comments: list[str]


def parsed(text: str) -> Chart:
    """Read a chart; an AssertionError says which line is not in the grammar."""
    lines = text.split("\n")
    assert lines[0] == "gantt" and lines[-1] == "" and lines[2] == "    dateFormat x"
    title = re.fullmatch(rf"    title ({TEXT})", lines[1])
    axis = re.fullmatch(r"    axisFormat (%Q|%S\.%L|%M:%S)", lines[3])
    assert title and axis, lines[:4]
    assert lines[4] == "    todayMarker off"
    chart, section = Chart(_read(title[1]), axis[1], [], []), ""
    for line in lines[5:-1]:
        if comment := re.fullmatch(r"    %% ([^{}\n]*)", line):
            chart.comments.append(comment[1])
        elif found := re.fullmatch(rf"    section ({TEXT})", line):
            section = _read(found[1])
        else:
            task = TASK.fullmatch(line)
            assert task and section, f"not a task: {line!r}"
            assert not re.match(r"(section|title|click|call|href|date|gantt|acc|\w+Axis|axis)", task[1]), line
            chart.tasks.append((section, _read(task[1]), task[2] or "", int(task[3]), int(task[4])))
    return chart


def _read(text: str) -> str:
    return html.unescape(text.replace("#", "&#"))


def a_run(ms: float) -> Report:
    """Three ranks; rank 2 takes longer in its backward."""
    work = even(data=ms / 10, forward=ms / 4, backward=ms, optimizer=ms / 10)
    return report_of(played(Schedule(steps=20, transmit=ms / 5), delayed(work, 2, "backward", ms / 2)))


def bar(seconds: float, start: float = 0.0, **facts: object) -> Bar:
    plain = Bar(0, "main", "forward", "", 1, start, seconds, 0, -1)
    return dataclasses.replace(plain, **facts)  # type: ignore[arg-type]


def chart_of(*bars: Bar, title: str = "a job") -> Chart:
    report = dataclasses.replace(report_of(Timeline()), title=title)
    return parsed(gantt(report, bars))


def test_one_step_of_the_typical_view_is_drawn_rank_by_rank() -> None:
    report = a_run(100)
    chart = parsed(render(report, Timeline()))
    typical = report.views[0]
    step = typical.usual_step
    assert chart.title == f"schedule, step {step} (axis in s)"
    bars = [b for b in typical.bars if b.step == step]
    assert len(chart.tasks) == len(bars) == 3 * 6 + 4  # two buckets a rank; ranks 0 and 1 wait in each
    assert list(dict.fromkeys(section for section, *_ in chart.tasks)) == [f"rank {r} · cpu" for r in range(3)]
    assert min(start for *_, start, _ in chart.tasks) == 0
    for rank in range(3):
        starts = [start for section, _, _, start, _ in chart.tasks if section.startswith(f"rank {rank} ")]
        assert starts == sorted(starts)


def test_the_bars_have_the_times_of_the_report() -> None:
    report = a_run(100)
    chart = parsed(render(report, Timeline()))
    typical = report.views[0]
    step = typical.usual_step
    bars = [b for b in typical.bars if b.step == step and b.kind != "communication"]
    origin = min(b.start for b in bars)
    expected = sorted(
        (f"rank {b.rank} · cpu", b.kind, round((b.start - origin) * 1e3), round((b.start + b.seconds - origin) * 1e3))
        for b in bars
    )
    drawn = [(section, re.split("[ ,]", text)[0], start, end) for section, text, _, start, end in chart.tasks]
    assert sorted(d for d in drawn if d[1] != "communication") == expected


def test_a_collective_begins_where_its_waiting_ends() -> None:
    chart = parsed(render(a_run(100), Timeline()))
    waits = [(section, end) for section, text, tag, _, end in chart.tasks if text.startswith("waiting")]
    begins = [(section, start) for section, text, tag, start, _ in chart.tasks if text.startswith("communication")]
    assert len(waits) == 4 and set(waits) <= set(begins)


def test_waiting_is_critical_and_communication_active() -> None:
    tags = {(text.split()[0].rstrip(","), tag) for _, text, tag, _, _ in parsed(render(a_run(100), Timeline())).tasks}
    assert dict(tags) == {
        **dict.fromkeys(["data", "forward", "backward", "optimizer"], ""),
        "communication": "active",
        "waiting": "crit",
    }
    assert len(tags) == 6
    assert [tag for _, _, tag, _, _ in chart_of(bar(1, kind="waiting")).tasks] == ["crit"]


def test_a_short_step_counts_microseconds_and_says_so() -> None:
    chart = parsed(render(a_run(1), Timeline()))
    assert chart.axis == "%Q" and chart.title.endswith("(axis in µs)")
    assert ("rank 0 · cpu", "backward, 1.7 ms", "", 350, 2050) in chart.tasks


@pytest.mark.parametrize(
    ("seconds", "axis", "end"),
    [(0.0999, "%Q", 99_900), (0.1, "%S.%L", 100), (59.9, "%S.%L", 59_900), (60.0, "%M:%S", 60_000)],
)
def test_the_axis_fits_the_length(seconds: float, axis: str, end: int) -> None:
    chart = chart_of(bar(seconds))
    assert (chart.axis, chart.tasks[0][4]) == (axis, end)


def test_no_bar_is_less_than_one_wide() -> None:
    chart = chart_of(bar(1.0), bar(0.0, 0.5), bar(1e-9, 0.7))
    assert [(start, end) for *_, start, end in chart.tasks] == [(0, 1000), (500, 501), (700, 701)]


def test_the_longest_bars_are_drawn_and_the_others_counted() -> None:
    chart = chart_of(*(bar((at * 37) % 101 / 10, at, rank=at % 2) for at in range(101)))
    assert len(chart.tasks) == MOST_BARS == 60
    assert min(end - start for *_, start, end in chart.tasks) == (101 - MOST_BARS) * 100
    assert "41 shorter bars left out." in chart.comments
    assert not [c for c in chart_of(bar(1)).comments if "left out" in c]


def test_steps_that_were_asked_for_are_drawn_whole() -> None:
    timeline = played(Schedule(steps=20), even(data=1, forward=2, backward=3, optimizer=1))
    chart = parsed(render(report_of(timeline, steps=(4, 5)), Timeline()))
    assert chart.title == "schedule, steps 4 to 5 (axis in µs)"
    assert len([text for _, text, *_ in chart.tasks if text.startswith("forward")]) == 6


def test_a_prediction_is_called_one() -> None:
    report = dataclasses.replace(a_run(100), source="predicted")
    assert ", predicted (" in parsed(render(report, Timeline())).title


def test_a_run_without_steps_cannot_be_drawn() -> None:
    with pytest.raises(UsageError, match="no steps to draw"):
        render(report_of(Timeline()), Timeline())


WEIRD = st.text(max_size=12) | st.sampled_from(
    [
        "a: b",
        "x;y",
        "#35;",
        "%%{init}%%",
        "a\nsection b",
        "<b>",
        "style: x #1;",
        "click me",
        "\\",
        "cuda:0",
        "::",
        " : 1, 2",
    ]
)


@given(title=WEIRD, name=WEIRD, start=st.floats(0, 1e4), seconds=st.floats(0, 1e4))
def test_any_name_stays_a_name(title: str, name: str, start: float, seconds: float) -> None:
    chart = chart_of(bar(seconds, start, name=name), bar(1, 0, kind="waiting", rank=1), title=title)
    assert len(chart.tasks) == 2
    plain = " ".join(re.sub(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]", " ", f"forward {name}").split())
    assert chart.tasks[0][1].startswith(plain)
    assert all(0 <= start < end for *_, start, end in chart.tasks)


@pytest.mark.parametrize(
    "line",
    [
        "    a: b :0, 1",
        "    a;b :0, 1",
        "    a # b :0, 1",
        "    a :0.5, 1",
        "    a :-1, 1",
        "    a :done, 0, 1",
        "    a",
        "a :0, 1",
    ],
)
def test_the_parser_catches(line: str) -> None:
    good = render(a_run(100), Timeline())
    parsed(good)
    with pytest.raises(AssertionError):
        parsed(good + line + "\n")
