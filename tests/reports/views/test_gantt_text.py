"""One step as rows of characters: the rows of known steps, and every column against a count of its moments."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.color import Color, ColorSystem

from meshwise.reports.analyse import report_of
from meshwise.reports.arrivals import OUTSIDE, arrival_table
from meshwise.reports.run_report import StepTimes, StepWindow
from meshwise.reports.spans import KIND, KINDS
from meshwise.reports.step_table import step_table_of
from meshwise.reports.step_windows import window_of
from meshwise.reports.views.gantt_text import column_kinds, gantt_text
from meshwise.spec.units import seconds_text
from meshwise.terminal.kind_marks import MARKS, NOT_FILLED, printable
from tests.reports.schedules import Schedule, delayed, even, jittered, played, timeline_of
from tests.reports.views.reports import bar, printed, window

MS = 1e-3


def two_ranks() -> StepWindow:
    """Rank 0 waits 8 ms in its backward for rank 1, which reads 8 ms longer."""
    bars = [
        bar(0, "data", 0, 4 * MS),
        bar(0, "forward", 4 * MS, 10 * MS),
        bar(0, "backward", 14 * MS, 22 * MS),
        bar(0, "communication", 24 * MS, 12 * MS, "communication", collective=0),
        bar(0, "optimizer", 36 * MS, 4 * MS),
        bar(1, "data", 0, 12 * MS),
        bar(1, "forward", 12 * MS, 10 * MS),
        bar(1, "backward", 22 * MS, 14 * MS),
        bar(1, "communication", 32 * MS, 4 * MS, "communication", collective=0),
        bar(1, "optimizer", 38 * MS, 2 * MS),
    ]
    return window(*bars)


def rows(view: StepWindow, width: int, **options: bool) -> list[str]:
    ranks = sorted({bar.rank for bar in view.bars})
    return [line.plain for line in gantt_text(view, ranks, width, **options)]


def test_the_rows_of_a_known_step() -> None:
    assert rows(two_ranks(), 47) == [
        "rank 0 ddddffffffffffbbbbbbbbbb░░░░░░░░════oooo",
        "  comm                         ░░░░░░░░════",
        "rank 1 ddddddddddddffffffffffbbbbbbbbbb════··oo",
        "  comm                                 ════",
        "       ╵0 ms               ╵20",
    ]


def test_without_the_lanes_beside() -> None:
    assert rows(two_ranks(), 47, overlapped=False) == [
        "rank 0 ddddffffffffffbbbbbbbbbb░░░░░░░░════oooo",
        "rank 1 ddddddddddddffffffffffbbbbbbbbbb════··oo",
        "       ╵0 ms               ╵20",
    ]


def test_half_the_width_shows_the_same_step() -> None:
    assert rows(two_ranks(), 27)[:4] == [
        "rank 0 ddfffffbbbbb░░░░══oo",
        "  comm             ░░░░══",
        "rank 1 ddddddfffffbbbbb══·o",
        "  comm                 ══",
    ]


def test_a_blocking_collective_lies_on_the_phase_in_which_it_was_called() -> None:
    view = window(
        bar(0, "evaluate", 0, 20 * MS),
        bar(0, "communication", 10 * MS, 8 * MS, collective=0),
        bar(1, "communication", 16 * MS, 2 * MS, collective=0),
    )
    assert rows(view, 27)[0] == "rank 0 eeeeeeeeee░░░░░░══ee"


def test_collectives_under_computing_are_seen_below_it_alone() -> None:
    view = window(
        bar(0, "backward", 0, 20 * MS),
        bar(0, "communication", 4 * MS, 6 * MS, "communication"),
        bar(0, "communication", 19 * MS, 1 * MS, "communication"),
    )
    assert rows(view, 27)[:2] == ["rank 0 " + "b" * 19 + "═", "  comm     ══════         ═"]


def test_a_span_alone_in_its_column_is_seen_however_short() -> None:
    view = window(bar(0, "forward", 0, 1 * MS), bar(0, "optimizer", 50 * MS, 1e-9), bar(0, "data", 99 * MS, 1 * MS))
    assert rows(view, 107)[0] == "rank 0 f" + "·" * 49 + "o" + "·" * 48 + "d"


def test_only_the_bars_of_the_step_are_drawn() -> None:
    view = window(
        bar(0, "forward", 0, 10 * MS), bar(0, "backward", 10 * MS, 10 * MS), bar(0, "data", 20 * MS, 30 * MS, step=2)
    )
    assert gantt_text(view, [0], 27, step=1)[0].plain == "rank 0 " + "f" * 10 + "b" * 10
    assert gantt_text(view, [0], 27, step=2)[0].plain == "rank 0 " + "d" * 20
    assert [(times.step, times.start, times.seconds) for times in view.steps] == [(1, 0, 0.02), (2, 0.02, 0.03)]


def test_nothing_gives_no_lines() -> None:
    assert gantt_text(window(bar(0, "forward", 0.0, 0.0)), [0], 80) == []
    assert gantt_text(two_ranks(), [0], 80, step=7) == []


@pytest.mark.parametrize(("usual", "step"), [(0.028, 2), (0.021, 1)])
def test_the_usual_step_takes_most_nearly_as_long_as_all_do(usual: float, step: int) -> None:
    times = [(1, 0, 20_000_000), (2, 20_000_000, 50_000_000)]
    rows = [(0, KIND["forward"], 0, 0, step, start, end, 0, -1) for step, start, end in times]
    spans = timeline_of(rows, 1).spans
    assert window_of("typical", spans, ("",), arrival_table(spans, ("",)), usual).usual_step == step


@pytest.mark.parametrize("seconds", [3e-6, 2.66e-3, 0.0412, 0.5, 7.0, 900.0])
@pytest.mark.parametrize("width", [20, 80, 200])
def test_ticks_stand_under_their_times(seconds: float, width: int) -> None:
    axis = gantt_text(window(bar(0, "forward", 0.0, seconds)), [0], width)[-1].plain
    assert len(axis) <= width
    columns = width - 7
    for tick in axis.split("╵")[1:]:
        at = float(tick.removesuffix(" ms").replace("ms", "").replace(",", "").strip()) / 1e3
        assert axis[7 + int(at / seconds * columns + 1e-9)] == "╵"
    assert axis.count("╵") >= (1 if width == 20 else 3)


def test_every_kind_has_a_mark_and_a_colour_of_its_own() -> None:
    assert [*MARKS] == [*KINDS]
    for field in ("mark", "colour", "word"):
        assert len({getattr(mark, field) for mark in MARKS.values()}) == len(MARKS)
    plain = [printable(mark.mark, True) for mark in MARKS.values()]
    assert "".join(plain).isascii() and len(set(plain)) == len(MARKS) == sum(map(len, plain))


@pytest.mark.parametrize("system", [ColorSystem.STANDARD, ColorSystem.EIGHT_BIT])
def test_colours_stay_apart_where_there_are_few(system: ColorSystem) -> None:
    shown = [(Color.parse(mark.colour).downgrade(system).number, kind in NOT_FILLED) for kind, mark in MARKS.items()]
    assert len(set(shown)) == len(MARKS)


def test_on_a_terminal_rows_are_coloured_and_wait_in_another_way() -> None:
    row = gantt_text(two_ranks(), [0], 47)[0]
    shown = printed(row, force_terminal=True, color_system="truecolor")
    assert "\x1b[30;48;2;86;180;233m" in shown  # forward: on its colour
    assert "\x1b[38;2;255;95;0m░" in shown  # waiting: in its colour


def test_what_a_step_shows_is_what_the_step_table_has() -> None:
    timeline = played(Schedule(ranks=3, steps=8, gap=0.3), delayed(jittered(even(), 5), 1, "backward", 4.0))
    table, report = step_table_of(timeline), report_of(timeline)
    view = report.views[0]
    of_step = {step: row for row, step in enumerate(table.step.tolist())}
    assert len(view.steps) == 5
    for times in view.steps:
        for rank in range(3):
            got = dict.fromkeys(KINDS, 0.0)
            for piece in view.attributed:
                if piece.rank == rank and piece.step == times.step:
                    got[piece.kind] += piece.seconds
            expected = dict(zip(KINDS, table.seconds[of_step[times.step], rank, :OUTSIDE].tolist(), strict=True))
            del got["idle"], expected["idle"]  # what is in no phase is no bar
            assert got == pytest.approx(expected, abs=2e-9)


def test_no_two_attributed_bars_of_a_rank_overlap_and_their_texts_are_their_times() -> None:
    timeline = played(Schedule(ranks=3, steps=8, buckets=(0.3, 0.6, 1.0)), delayed(jittered(even(), 5), 1, "data", 4.0))
    for view in report_of(timeline).views:
        for rank in range(3):
            bars = [one for one in view.attributed if one.rank == rank]
            assert len(bars) > 20
            for one, other in itertools.pairwise(bars):
                assert one.start + one.seconds <= other.start + 1e-12
        for one in view.bars:
            assert one.text.startswith(f"{seconds_text(one.seconds)} from {seconds_text(one.start)}")


TICKS = 60


@given(st.lists(st.sampled_from(["", *KINDS]), min_size=TICKS, max_size=TICKS), st.sampled_from([5, 6, 10, 12, 20, 60]))
def test_every_column_shows_the_kind_that_has_most_of_it(owners: list[str], columns: int) -> None:
    bars = [bar(0, kind, float(tick), 1.0) for tick, kind in enumerate(owners) if kind]
    each = TICKS // columns
    row = column_kinds(bars, StepTimes(1, 0.0, float(TICKS)), columns)
    for column, kind in enumerate(row):
        moments = [owner for owner in owners[column * each : (column + 1) * each] if owner]
        most = max(map(moments.count, moments), default=0)
        assert kind == next((k for k in KINDS if most and moments.count(k) == most), "")


@given(st.lists(st.tuples(st.floats(1e-6, 1), st.sampled_from(KINDS)), min_size=1, max_size=20), st.integers(1, 40))
def test_bars_one_after_the_other_fill_every_column(parts: list[tuple[float, str]], columns: int) -> None:
    bars, at = [], 0.0
    for seconds, kind in parts:
        bars.append(bar(0, kind, at, seconds))
        at += seconds
    assert all(column_kinds(bars, StepTimes(1, 0.0, at), columns))
