"""The live view: exact plain lines, a drawing that fits, and nothing that a lost terminal can break."""

from __future__ import annotations

import dataclasses
import io
import math
import re
import threading
import time
from collections.abc import Callable

import pytest
from rich.console import Console

from meshwise.reports.views.live_progress import (
    LiveView,
    TrainingProgress,
    live_area,
    memory_text,
    progress_line,
    sparkline,
)

GIB = 2**30
FIRST = TrainingProgress("mnist-mlp", 1, 5, 100, 938, 0.23451, 12300.4, 84.0, (GIB // 2, None))


class Lost(io.StringIO):
    """A terminal that has gone away."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error

    def write(self, text: str) -> int:
        raise self.error


def plain(file: io.StringIO) -> Console:
    return Console(file=file, force_terminal=False, width=80)


def terminal(file: io.StringIO, **options: int) -> Console:
    return Console(file=file, force_terminal=True, width=80, height=24, _environ={"TERM": "xterm-256color"}, **options)


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, "the live view was never drawn"
        time.sleep(0.02)


@pytest.mark.parametrize(
    "changes, line",
    [
        ({}, "epoch 1/5  step 100/938  loss 0.2345  12,300 samples/s"),
        ({"step": 7}, "epoch 1/5  step   7/938  loss 0.2345  12,300 samples/s"),
        ({"epochs": 10}, "epoch  1/10  step 100/938  loss 0.2345  12,300 samples/s"),
        ({"steps": None}, "epoch 1/5  step 100  loss 0.2345  12,300 samples/s"),
        ({"loss": None}, "epoch 1/5  step 100/938  12,300 samples/s"),
        ({"loss": 2.5e-6}, "epoch 1/5  step 100/938  loss 2.500e-06  12,300 samples/s"),
        ({"loss": 123456.78}, "epoch 1/5  step 100/938  loss 123,456.8  12,300 samples/s"),
        ({"loss": math.nan, "samples_per_second": None}, "epoch 1/5  step 100/938  loss nan"),
        ({"samples_per_second": 0.0512}, "epoch 1/5  step 100/938  loss 0.2345  0.051 samples/s"),
    ],
)
def test_progress_as_a_plain_line(changes: dict[str, object], line: str) -> None:
    assert progress_line(dataclasses.replace(FIRST, **changes)) == line


def test_elsewhere_than_on_a_terminal_every_update_is_a_line_and_text_is_as_it_is() -> None:
    file = io.StringIO()
    long = "x" * 200 + " [bold]x[/bold] :smile: 12.5 [/oops]"
    with LiveView(plain(file)) as view:
        view.update(FIRST)
        view.print(long)
        view.update(dataclasses.replace(FIRST, step=200))
    assert (
        file.getvalue() == f"{progress_line(FIRST)}\n{long}\nepoch 1/5  step 200/938  loss 0.2345  12,300 samples/s\n"
    )


def test_a_dumb_terminal_gets_plain_lines() -> None:
    file = io.StringIO()
    with LiveView(Console(file=file, force_terminal=True, width=80, _environ={"TERM": "dumb"})) as view:
        view.update(FIRST)
    assert file.getvalue() == f"{progress_line(FIRST)}\n"


def test_a_view_that_is_never_entered_prints_lines() -> None:
    file = io.StringIO()
    LiveView(terminal(file)).update(FIRST)
    assert file.getvalue() == f"{progress_line(FIRST)}\n"


def test_without_a_console_the_lines_go_to_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    with LiveView() as view:
        view.update(FIRST)
    assert capsys.readouterr().out == f"{progress_line(FIRST)}\n"


def test_a_terminal_shows_the_area_and_gets_its_cursor_back() -> None:
    file = io.StringIO()
    with LiveView(terminal(file)) as view:
        view.update(FIRST)
        wait_for(lambda: "epoch 1/5" in file.getvalue())
        view.print("[bold]x[/bold] \x1b[2Jand [/oops]")
    shown = file.getvalue()
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown)
    for fact in (
        "mnist-mlp",
        "step 100/938",
        "10 %",
        "2 %",
        "0.2345",
        "12,300 samples/s",
        "1 min 24 s left",
        "512.0 MiB",
    ):
        assert fact in text
    assert "[bold]x[/bold] and [/oops]" in text and "\x1b[2J" not in shown
    assert shown.rindex("\x1b[?25h") > shown.rindex("\x1b[?25l")


def test_an_error_takes_the_area_away_and_leaves_how_far_the_run_came() -> None:
    file = io.StringIO()
    with pytest.raises(RuntimeError, match="lost"), LiveView(terminal(file)) as view:
        view.update(FIRST)
        wait_for(lambda: "epoch 1/5" in file.getvalue())
        raise RuntimeError("lost")
    assert "\x1b[?25h" in file.getvalue() and file.getvalue().endswith(f"{progress_line(FIRST)}\n")


def test_update_only_stores_on_a_terminal() -> None:
    file = io.StringIO()
    with LiveView(terminal(file)) as view:
        for step in range(1, 201):
            view.update(dataclasses.replace(FIRST, step=step, loss=1 / step))
        wait_for(lambda: "step 200/938" in file.getvalue())
    assert file.getvalue().count("mnist-mlp") < 100


@pytest.mark.parametrize(
    "error", [BrokenPipeError(32, "Broken pipe"), OSError(5, "Input/output error"), ValueError("closed file")]
)
@pytest.mark.parametrize("make", [plain, terminal])
def test_a_terminal_that_is_gone_ends_the_drawing_but_not_the_run(
    make: Callable[[io.StringIO], Console], error: Exception
) -> None:
    console = make(Lost(error))
    with LiveView(console) as view:
        view.update(FIRST)
        time.sleep(0.6)  # the time of two refreshes
        view.print("still here")
        view.update(dataclasses.replace(FIRST, step=200))
        assert view._thread is None or view._thread.is_alive()
    console.print("the summary")


def test_a_file_that_cannot_hold_a_character_shows_another() -> None:
    raw = io.BytesIO()
    with LiveView(Console(file=io.TextIOWrapper(raw, "ascii"), force_terminal=False, width=80)) as view:
        view.print("größer")
        view.print("still here")
    assert raw.getvalue().split() == b"gr??er still here".split()


def test_lines_of_several_threads_stay_whole() -> None:
    file = io.StringIO()
    with LiveView(terminal(file)) as view:
        view.update(FIRST)
        threads = [threading.Thread(target=lambda n=n: [view.print(f"<{n} {i}>") for i in range(50)]) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert all(f"<{n} {i}>" in file.getvalue() for n in range(4) for i in range(50))


def test_sixteen_devices_fit_into_few_lines_of_eighty_columns() -> None:
    memory = tuple(61 * GIB + n * 2**28 for n in range(16))
    assert memory_text(memory) == "61.0 GiB to 64.8 GiB"
    file = io.StringIO()
    area = dataclasses.replace(FIRST, memory=memory, epochs=1000, steps=1_000_000)
    console = plain(file)
    console.print(live_area(area, [1 / n for n in range(1, 25)], console))
    drawn = file.getvalue().splitlines()
    assert len(drawn) <= 10 and all(len(line) <= 80 for line in drawn) and "…" not in file.getvalue()


def test_the_memory_of_few_ranks_is_said_of_each() -> None:
    assert memory_text((GIB // 2, None)) == "512.0 MiB, unknown"


@pytest.mark.parametrize("left, text", [(12.5, "12 s left"), (0.1, "1 s left"), (math.inf, "unknown left")])
def test_time_left_is_in_whole_seconds(left: float, text: str) -> None:
    file = io.StringIO()
    plain(file).print(live_area(dataclasses.replace(FIRST, seconds_left=left), [], plain(file)))
    assert f"   {text}" in file.getvalue()


def test_a_narrow_terminal_shortens_the_sparkline_not_the_facts() -> None:
    console = Console(file=io.StringIO(), force_terminal=False, width=60)
    with console.capture() as shown:
        console.print(live_area(FIRST, [float(n) for n in range(24)], console))
    assert "█   12,300 samples/s   1 min 24 s left" in shown.get() and "▁" in shown.get()


def test_sparkline_spans_the_lowest_and_the_highest() -> None:
    assert sparkline([0.0, 7.0, 3.0]) == "▁█▄"
    assert sparkline([1.0, 1.0]) == "▁▁"
    assert sparkline([math.nan, 1.0, 2.0]) == "?▁█"
