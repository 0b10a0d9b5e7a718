"""The report on a screen: what it says, that it fits, and that nothing on it is cut or added up wrongly."""

from __future__ import annotations

import dataclasses
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwise.reports.analyse import report_of
from meshwise.reports.run_report import Finding, GoodputPart, Report, Series
from meshwise.reports.views.report_text import COLUMNS, OF_STEP, bar_text, outliers, report_text, whole_parts
from tests.reports.schedules import Schedule, delayed, even, played
from tests.reports.views.reports import plain, printed, report_on

EVEN = delayed(even(), 1, "forward", 8.0)


def words(text: str) -> str:
    return " ".join(text.split())


def test_the_whole_text_of_a_run_on_two_devices() -> None:
    report = report_on(2, EVEN, wall_seconds=83.0)
    assert printed(report_text(report)) == (
        "gpt-125m finished · 40 steps of 45 ms · 12,346 samples/s · 1 min 23 s in all\n"
        "Rank 1 is a straggler in forward: last in 100 % of the steps, by 8.0 ms. Without\n"
        "the delay a step would take 8.0 ms less (18 %).\n"
        "\n"
        "rank       step  its step            compute  comm  wait  last    cost    memory\n"
        "0 cuda:0  45 ms  dffffbbbbbbbb═░░░o     73 %   4 %  18 %    0×     0 s  61.2 GiB\n"
        "1 cuda:1  45 ms  dfffffffbbbbbbbb═o     91 %   4 %   0 %   40×  320 ms  61.3 GiB\n"
        "\n"
        "step 1, one of usual length\n"
        "rank 0 dddffffffffffffffffbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbb░░░░░░░░░░░░░═══ooooo\n"
        "  comm                                    ░░░░░░░░░░░░░░═══░░░░░░░░░░░░░════\n"
        "rank 1 dddfffffffffffffffffffffffffffffbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbb═══ooooo\n"
        "  comm                                                 ════            ═════\n"
        "       ╵0 ms           ╵10             ╵20             ╵30             ╵40\n"
        "d data  f forward  b backward  ═ communication  ░ waiting  o optimizer\n"
        "\n"
        "goodput  82 % useful · 18 % waiting (stragglers 9 %, data 4 %,\n"
        "communication 4 %)\n"
        "try      Look for another program on its device, a lower clock, longer samples,\n"
        "or extra work on this rank.\n"
        "clocks   times of different ranks agree to ±19 µs\n"
    )


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
@pytest.mark.parametrize(("width", "height"), [(80, 24), (120, 40), (60, 24), (200, 60)])
def test_it_fits_the_screen_with_the_verdict_and_every_rank(ranks: int, width: int, height: int) -> None:
    report = report_on(ranks, missing=["rank 1 was cut off in step 40."])
    text = printed(report_text(report, width, height), 300)
    lines = text.splitlines()
    assert len(lines) <= height
    assert max(map(len, lines)) <= width
    assert report.verdict in words(text)
    assert report.findings[0].advice in words(text)
    for rank in report.ranks:
        assert re.search(rf"^{rank.rank}( cuda:{rank.rank})? .*%", text, re.MULTILINE)


@pytest.mark.parametrize("width", [30, 36, 44, 52, 70, 80, 100, 160])
@pytest.mark.parametrize("ranks", [1, 3, 64])
def test_no_number_is_cut_or_separated_from_its_unit(ranks: int, width: int) -> None:
    text = printed(report_text(report_on(ranks)), width)
    assert max(map(len, text.splitlines())) <= width
    assert not re.search(r"\d\n(%|µs|ms|s|GiB|MiB)\b", text)
    assert "…" not in "".join(text.splitlines()[1:])
    whole = printed(report_text(report_on(ranks)), 300)
    number = r"(?<!\S)[\d.,<]+(?: (?:%|ms|s|GiB)(?!\S)|×)"
    for line in text.splitlines():
        if name := re.match(r"\d+ cuda:\d+", line):
            full = next(row for row in whole.splitlines() if row.startswith(f"{name[0]} "))
            cells = re.findall(number, line[name.end() :])
            assert cells and not set(cells) - set(re.findall(number, full))
            assert not re.search(r"\d", re.sub(number, "", line[name.end() :]))


def test_numbers_of_the_table_are_those_of_the_report() -> None:
    report = report_on(2, EVEN)
    row = next(line for line in printed(report_text(report)).splitlines() if line.startswith("1 cuda:1"))
    rank = report.ranks[1]
    step = sum(rank.seconds[kind] for kind in OF_STEP)
    computing = sum(rank.seconds[kind] for kind in ("forward", "backward", "optimizer"))
    assert f"{computing / step:.0%}".replace("%", " %") in row
    assert f"{rank.last_steps}×" in row
    assert "45 ms" in row and "320 ms" in row and "61.3 GiB" in row


def test_of_many_ranks_the_extremes_and_those_that_stand_out_are_named() -> None:
    report = report_on(64)
    report.ranks[5] = dataclasses.replace(report.ranks[5], peak_memory=200 * 2**30)
    text = printed(report_text(report, 80, 24))
    assert [rank.rank for rank in outliers(report)] == [63, 5]
    for row in ("min ", "median ", "max ", "5 cuda:5 ", "63 cuda:63 "):
        assert re.search(rf"^{row}", text, re.MULTILINE)
    assert len(text.splitlines()) <= 24
    assert re.search(r"^max .*200\.0 GiB$", text, re.MULTILINE)
    assert re.search(r"one of usual length, \d+ of 64 ranks", text)


def test_evenly_many_ranks_have_no_outliers() -> None:
    assert outliers(report_on(16, even())) == []


def test_goodput_adds_up_to_a_hundred() -> None:
    shares = {"useful": 0.336, "evaluation": 0.0, "saving": 0.002, "waiting": 0.333, "starting": 0.329}
    goodput = [GoodputPart(name, share * 10, share) for name, share in shares.items()]
    waiting = [
        GoodputPart("data", 3.0, 0.3),
        GoodputPart("communication", 0.33, 0.033),
        GoodputPart("stragglers", 0.0, 0.0),
    ]
    line = next(
        line
        for line in printed(report_text(report_on(2, goodput=goodput, waiting=waiting)), 120).splitlines()
        if line.startswith("goodput")
    )
    assert line == "goodput  34 % useful · 33 % waiting (data 30 %, communication 3 %) · 33 % starting"


@given(st.lists(st.floats(0, 1e6), max_size=12), st.integers(0, 300))
def test_whole_parts_add_up_and_are_within_one_of_their_share(shares: list[float], whole: int) -> None:
    parts = whole_parts(shares, whole)
    total = sum(shares)
    if total <= 0:
        assert not any(parts)
        return
    assert sum(parts) == whole
    for share, part in zip(shares, parts, strict=True):
        assert abs(part - share / total * whole) < 1 + 1e-6


@given(st.dictionaries(st.sampled_from(OF_STEP), st.floats(0, 10), max_size=8), st.integers(1, 100))
def test_a_bar_has_its_width_and_its_kinds_in_the_order_of_a_step(seconds: dict[str, float], width: int) -> None:
    bar = bar_text(seconds, width).plain
    assert len(bar) == width
    runs = re.sub(r"(.)\1*", r"\1", bar.rstrip())
    assert len(runs) == len(set(runs))


def test_a_console_of_ascii_alone_gets_it_in_ascii() -> None:
    text = printed(report_text(report_on(3, title="modèle", verdict="By 3 µs.")), 80, "ascii")
    assert text.isascii()
    assert "By 3 us." in text and "mod?le finished" in text
    assert "===" in text and "~~~" in text
    assert "agree to ~19 us" in text


def test_in_a_pipe_there_are_no_codes_and_on_a_terminal_colours_change_no_character() -> None:
    report = report_on(3)
    piped = printed(report_text(report, 80, 24))
    shown = printed(report_text(report, 80, 24), force_terminal=True, color_system="truecolor")
    assert "\x1b" not in piped
    assert "\x1b[1;38;2;255;95;0m2 cuda:2" in shown  # the rank that the finding is about
    assert plain(shown) == piped


def test_on_a_terminal_it_leaves_a_line_for_the_prompt_and_in_a_pipe_nothing_out() -> None:
    report = report_on(8)
    shown = printed(report_text(report), force_terminal=True, color_system=None, height=24)
    assert len(shown.splitlines()) <= 23
    piped = printed(report_text(report))
    assert len(re.findall(r"^rank \d ", piped, re.MULTILINE)) == 8
    assert len(re.findall(r"^  comm ", piped, re.MULTILINE)) == 8


def test_what_is_missing_is_told_up_to_three_sentences() -> None:
    report = report_on(2, missing=[f"rank {rank} left no log." for rank in range(2, 7)])
    text = printed(report_text(report))
    assert [line for line in text.splitlines() if line.startswith("missing")] == [
        "missing  rank 2 left no log.",
        "missing  rank 3 left no log.",
        "missing  rank 4 left no log.",
        "missing  and 2 more",
    ]


def test_on_a_low_screen_missing_sentences_give_way_to_the_table_and_the_advice() -> None:
    report = report_on(8, missing=[f"rank {rank} was cut off in step 40: " + "and so on " * 8 for rank in range(8)])
    text = printed(report_text(report, 80, 23))
    assert len(text.splitlines()) <= 23
    assert "missing  rank 0 was cut off" in text and re.search("^7 cuda:7 ", text, re.MULTILINE)
    assert report.findings[0].advice in words(text)


def test_a_long_title_is_cut_at_its_beginning() -> None:
    report = report_on(2, title="experiments/2026/november/a/very/long/path/to/train_the_model.py")
    first = printed(report_text(report)).splitlines()[0]
    assert first.startswith("…") and "ain_the_model.py finished · 40 steps" in first
    assert len(first) == 80


def test_a_short_title_is_whole_and_the_line_wraps() -> None:
    text = printed(report_text(report_on(2, title="linear-layers-with-dropout")), 60)
    assert text.startswith("linear-layers-with-dropout finished · 40 steps of ") and "…" not in text


def empty(**changes: object) -> Report:
    verdict = "No step was recorded, so it is unknown what limits a step."
    report = Report("gpt-125m", "failed", "measured", "runs/x", {}, {}, "", verdict, [], [], 0, 0.0, 0.0, None, 2.0,
                    [], [], {}, [], [], 0.0, [], Series(), [], [])  # fmt: skip
    return dataclasses.replace(report, **changes)  # type: ignore[arg-type]


def test_a_run_without_steps_says_so_and_nothing_else() -> None:
    assert printed(report_text(empty())) == (
        "gpt-125m failed · 2.0 s in all\nNo step was recorded, so it is unknown what limits a step.\n"
    )


def test_ranks_without_steps_have_rows_without_numbers() -> None:
    ranks = [
        dataclasses.replace(rank, steps=0, seconds={}, step_shares={}, sync_points=0, peak_memory=None)
        for rank in report_on(2).ranks
    ]
    text = printed(report_text(empty(ranks=ranks)))
    assert "0 cuda:0" in text and "1 cuda:1" in text
    assert "%" not in text and " 0 s" not in text


def test_markup_in_names_is_shown_as_it_is() -> None:
    finding = Finding("input", "Input.", "[bold]x[/bold] waits.", "Read [ahead].", 0.5, 0.1)
    text = printed(report_text(report_on(2, title="[red]job", verdict=finding.sentence, findings=[finding])))
    assert "[red]job finished" in text and "[bold]x[/bold] waits." in text and "Read [ahead]." in text


def test_kinds_that_only_the_step_has_are_in_the_legend_too() -> None:
    text = printed(report_text(report_on(3)))
    legend = next(line for line in text.splitlines() if line.startswith("d data"))
    for mark in set("".join(re.findall(r"^rank \d (.*)$", text, re.MULTILINE))) - {" "}:
        assert f"{mark} " in legend


def test_chosen_steps_are_drawn_as_they_were_asked_for() -> None:
    timeline = played(Schedule(ranks=2), EVEN)
    text = printed(report_text(report_of(timeline, "x", (7, 9))))
    assert "\nsteps 7 to 9\n" in text
    row = next(line for line in text.splitlines() if line.startswith("rank 0 "))
    assert len(re.findall("d+", row.removeprefix("rank 0"))) == 3
    assert "\nstep 7\n" in printed(report_text(report_of(timeline, "x", (7, 7))))
    assert re.search(r"\nstep \d+, one of usual length\n", printed(report_text(report_of(timeline, "x", (7, 30)))))


@pytest.mark.parametrize(("width", "told"), [(120, False), (40, True), (30, True)])
def test_columns_that_a_narrow_screen_has_no_room_for_are_named(width: int, told: bool) -> None:
    def titles(lines: list[str]) -> list[str]:
        line = next(line for line in lines if re.match(r"rank  +step", line))
        return [word for word in line.split() if word in COLUMNS]

    report = report_on(2)
    shown = printed(report_text(report, width)).splitlines()
    left_out = [name for line in shown if line.startswith("--json has ") for name in line.split()[2:]]
    assert bool(left_out) == told
    assert {*titles(shown), *left_out} == {*titles(printed(report_text(report, 120)).splitlines())}
