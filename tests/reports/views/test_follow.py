"""Watching a run: folders that grow, stand still, end and are half written, and the whole screen of a real terminal."""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

import pytest
from rich.console import Console

from meshwise.reports.read import SILENT
from meshwise.reports.views import follow as following
from meshwise.reports.views.follow import BLOCKS, LINE_EVERY, follow, line_of, poll, screen, silence
from meshwise.spec.errors import UsageError
from tests.reports.schedules import Schedule, delayed, even, jittered, played
from tests.reports.views.reports import plain, printed, write_folder

STEPS = 60
RUNS = {
    ranks: played(Schedule(ranks=ranks, steps=STEPS), delayed(jittered(even(), 4), ranks - 1, "forward", 6.0))
    for ranks in (2, 4, 8)
}
LATE = "is a straggler in forward: last in 100 % of the steps"


class Clock:
    """Time that passes only in sleep, in which things may happen: `at` a moment, call."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **events: Callable[[], None]) -> None:
        self.now = 1000.0
        self.slept: list[float] = []
        self.events = {1000.0 + float(at.removeprefix("at")): call for at, call in events.items()}
        began = time.time() - self.now
        monkeypatch.setattr(following.time, "monotonic", lambda: self.now)
        monkeypatch.setattr(following.time, "time", lambda: began + self.now)
        monkeypatch.setattr(following.time, "sleep", self.sleep)

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds
        for at in [at for at in sorted(self.events) if at <= self.now]:
            self.events.pop(at)()


def followed(folder: Path, stop: Callable[[], bool] | None = None, *, terminal: bool = False) -> str:
    file = io.StringIO()
    colours: Literal["truecolor", "auto"] = "truecolor" if terminal else "auto"
    follow(folder, Console(file=file, width=200, height=40, force_terminal=terminal, color_system=colours), stop=stop)
    return file.getvalue()


def test_elsewhere_than_on_a_terminal_a_line_every_ten_seconds_and_the_report_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_folder(tmp_path, RUNS[2], 0)
    Clock(
        monkeypatch,
        at2=lambda: write_folder(tmp_path, RUNS[2], 20),
        at12=lambda: write_folder(tmp_path, RUNS[2], 30),
        at25=lambda: write_folder(tmp_path, RUNS[2], STEPS, "finished"),
    )
    lines = followed(tmp_path).splitlines()
    assert lines[0] == "running  No step yet: the workers are starting."
    assert lines[1].startswith(
        "running  step 20  43 ms a step  Rank 1 is a straggler in forward: last in 100 % of the ste"
    )
    assert lines[2].startswith("running  step 30  43 ms a step  Rank 1 is a straggler")
    assert lines[3].startswith("gpt-125m finished · 60 steps of 43 ms")
    assert LATE in lines[4]
    assert any(line.startswith("goodput  ") for line in lines)
    assert "\x1b" not in "".join(lines)


@pytest.mark.parametrize("status", ["finished", "stopped", "failed"])
def test_a_run_that_is_over_is_reported_once(tmp_path: Path, status: str) -> None:
    write_folder(tmp_path, RUNS[2], STEPS, status)
    lines = followed(tmp_path).splitlines()
    assert lines[0].startswith(f"gpt-125m {status} · 60 steps")
    assert sum(line.startswith("rank 0 ") for line in lines) == 1


def test_it_leaves_when_told_and_prints_nothing_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_folder(tmp_path, RUNS[2], 20)
    clock = Clock(monkeypatch)
    lines = followed(tmp_path, stop=lambda: clock.now > 1003).splitlines()
    assert len(lines) == 1 and lines[0].startswith("running  step 20")
    assert clock.slept == [pytest.approx(1.0)] * 4


@pytest.mark.parametrize("terminal", [False, True])
def test_ctrl_c_leaves_quietly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, terminal: bool) -> None:
    write_folder(tmp_path, RUNS[2], 20)

    def interrupted() -> None:
        raise KeyboardInterrupt

    Clock(monkeypatch, at3=interrupted)
    monkeypatch.setenv("TERM", "xterm")
    text = followed(tmp_path, terminal=terminal)
    assert "Traceback" not in text and "goodput  " not in text.partition("\x1b[?1049l")[2]
    if terminal:
        assert text.index("\x1b[?1049h") < text.index("\x1b[?1049l")  # the screen that was there comes back
        assert "\x1b[?25h" in text.partition("\x1b[?1049l")[0] + text.partition("\x1b[?1049l")[2]


def test_a_folder_that_is_none_of_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="not a run folder"):
        followed(tmp_path)


def test_a_run_whose_logs_stand_still_is_said_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_folder(tmp_path, RUNS[2], 20)
    clock = Clock(monkeypatch)
    lines = followed(tmp_path, stop=lambda: clock.now > 1000 + 4 * SILENT).splitlines()
    told = [line for line in lines if line.startswith("No log has grown for ")]
    assert len(told) == 1
    assert told[0].startswith("No log has grown for 1 min 00 s: the run's launcher may have been killed")
    assert len(lines) - 1 == pytest.approx(4 * SILENT / LINE_EVERY, abs=1)


def test_a_run_that_had_died_before_is_told_at_once(tmp_path: Path) -> None:
    write_folder(tmp_path, RUNS[2], 20)
    past = time.time() - 300
    for path in [tmp_path / "run.json", *(tmp_path / "spans").iterdir()]:
        os.utime(path, (past, past))
    snapshot = poll(tmp_path)
    assert silence(snapshot).startswith("No log has grown for 5 min 0")
    assert "No log has grown" in printed(screen(snapshot, Console(width=80, height=24)))
    write_folder(tmp_path, RUNS[2], 21)
    assert silence(poll(tmp_path, snapshot)) == ""


def test_files_that_are_half_written_leave_what_was_seen(tmp_path: Path) -> None:
    write_folder(tmp_path, RUNS[2], 20)
    snapshot = poll(tmp_path)
    assert snapshot.report is not None and snapshot.report.steps == 20
    (tmp_path / "run.json").write_text('{"job": "gpt-1')
    again = poll(tmp_path, snapshot)
    assert again.report is snapshot.report and again.running
    write_folder(tmp_path, RUNS[2], 25, half=True)
    later = poll(tmp_path, again)
    assert later.report is not None and later.report.steps == 24


@pytest.mark.parametrize("size", [0, 1, 40, 200, 300, 1000])
def test_logs_cut_off_anywhere_are_no_error(tmp_path: Path, size: int) -> None:
    write_folder(tmp_path, RUNS[2], 20)
    log = tmp_path / "spans" / "rank1.jsonl"
    log.write_bytes(log.read_bytes()[:size])
    snapshot = poll(tmp_path)
    assert snapshot.running
    assert line_of(snapshot).startswith("running  ")
    assert "gpt-125m running" in printed(screen(snapshot, Console(width=80, height=24)))


def test_when_nothing_can_be_read_it_says_so_and_goes_on(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text("{")
    snapshot = poll(tmp_path)
    assert snapshot.running and snapshot.report is None
    assert line_of(snapshot) == "running  its files cannot be read yet"
    assert "cannot be read yet" in printed(screen(snapshot, Console(width=80, height=24)))
    write_folder(tmp_path, RUNS[2], 20)
    assert poll(tmp_path, snapshot).report is not None


def test_what_did_not_change_is_not_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_folder(tmp_path, RUNS[2], 20)
    snapshot = poll(tmp_path)
    monkeypatch.setattr(following, "read_timeline", None)
    assert poll(tmp_path, snapshot) is snapshot


def test_of_a_long_run_it_says_what_stretch_it_shows(tmp_path: Path) -> None:
    write_folder(tmp_path, RUNS[2], STEPS)
    snapshot = poll(tmp_path)
    assert snapshot.report is not None and snapshot.report.steps == STEPS and snapshot.report.goodput == []
    assert snapshot.report.ranks[0].steps == BLOCKS
    assert snapshot.window == pytest.approx(BLOCKS * 0.043, rel=0.05)
    text = printed(screen(snapshot, Console(width=80, height=24)))
    assert "running · 60 steps of 43 ms" in text
    assert "of the newest 2 s · Ctrl-C leaves; the run continues" in text
    assert "goodput" not in text


def test_reading_that_takes_long_is_done_less_often(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_folder(tmp_path, RUNS[2], 20)
    clock = Clock(monkeypatch)
    real, grown = following.read_timeline, iter(range(21, 40))

    def slow(folder: Path, **options: int) -> object:
        clock.now += 2.0
        return real(folder, **options)

    monkeypatch.setattr(following, "read_timeline", slow)

    def stop() -> bool:
        write_folder(tmp_path, RUNS[2], next(grown))
        return clock.now > 1020

    followed(tmp_path, stop=stop)
    assert clock.slept == [pytest.approx(6.0)] * 3  # a quarter of a core: 2 s of 8


def test_on_a_terminal_the_screen_is_drawn_and_the_report_stays_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_folder(tmp_path, RUNS[4], 20)
    Clock(monkeypatch, at5=lambda: write_folder(tmp_path, RUNS[4], STEPS, "finished"))
    monkeypatch.setenv("TERM", "xterm")
    drawn, _, after = followed(tmp_path, terminal=True).partition("\x1b[?1049l")
    assert drawn.count("gpt-125m") == 5  # one a second
    assert "\x1b[2J" not in drawn.partition("gpt-125m")[2]  # drawn over, never wiped: no flicker
    assert "gpt-125m finished · 60 steps" in plain(after)
    assert LATE in plain(after)


class Terminal:
    """A terminal of 80 by 24 in tmux, in which one command runs."""

    def __init__(self, command: str) -> None:
        self.folder = tempfile.mkdtemp(prefix="tmux-")  # a short path: a socket's may have about 100 characters
        environment = f"PYTHONPATH={os.pathsep.join(sys.path)}"
        self.tmux(
            "new-session", "-d", "-x", "80", "-y", "24", "-e", environment, f"{command}; printf 'left %s' $?; sleep 100"
        )

    def tmux(self, *words: str) -> str:
        done = subprocess.run(
            ["tmux", "-S", f"{self.folder}/s", "-f", os.devnull, *words], check=True, capture_output=True
        )
        return done.stdout.decode()

    def shown(self, *words: str, seconds: float = 90) -> list[str]:
        """The lines of the screen, once all the words are on it."""
        until = time.monotonic() + seconds
        while True:
            text = self.tmux("capture-pane", "-p")
            if all(word in " ".join(text.split()) for word in words):
                return text.rstrip("\n").splitlines()
            assert time.monotonic() < until, f"{words} not on the screen:\n{text}"
            time.sleep(0.2)


@pytest.fixture
def open_terminal(processes: None) -> Iterator[Callable[[str], Terminal]]:
    if shutil.which("tmux") is None:
        pytest.skip("tmux is missing: the screen of a real terminal is not looked at")
    opened: list[Terminal] = []

    def open_one(command: str) -> Terminal:
        opened.append(Terminal(command))
        return opened[-1]

    yield open_one
    for terminal in opened:
        terminal.tmux("kill-server")
        shutil.rmtree(terminal.folder)


CODE = """
import sys
from pathlib import Path
from rich.console import Console
from meshwise.reports.views.follow import follow
follow(Path(sys.argv[1]), Console(), every=0.2)
"""


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow), pytest.param(8, marks=pytest.mark.slow)])
def test_the_whole_report_fits_on_a_real_screen(
    tmp_path: Path, ranks: int, open_terminal: Callable[[str], Terminal]
) -> None:
    folder = tmp_path / "run"
    write_folder(folder, RUNS[ranks], 20)
    (tmp_path / "watch.py").write_text(CODE)
    terminal = open_terminal(f"{sys.executable} {tmp_path / 'watch.py'} {folder}")
    late = f"Rank {ranks - 1} {LATE}"
    for lines in (
        terminal.shown("gpt-125m running · 20 steps", late, "Ctrl-C leaves"),
        (write_folder(folder, RUNS[ranks], STEPS), terminal.shown("gpt-125m running · 60 steps", late))[1],
        (write_folder(folder, RUNS[ranks], STEPS, "finished"), terminal.shown("gpt-125m finished", late, "left 0"))[1],
    ):
        assert len(lines) <= 24 and max(map(len, lines)) <= 80
        assert lines[0].startswith("gpt-125m ")
        assert lines[1].startswith(late)
        table = next(at for at, line in enumerate(lines) if line.startswith("rank ")) + 1
        for rank in range(ranks):
            assert lines[table + rank].startswith(f"{rank} ") and lines[table + rank].endswith(("s", "%"))
        assert any(line.startswith("try ") for line in lines)


def test_ctrl_c_in_a_real_terminal_gives_the_screen_back(
    tmp_path: Path, open_terminal: Callable[[str], Terminal]
) -> None:
    folder = tmp_path / "run"
    write_folder(folder, RUNS[2], 20)
    (tmp_path / "watch.py").write_text(CODE)
    terminal = open_terminal(f"{sys.executable} {tmp_path / 'watch.py'} {folder}")
    terminal.shown("gpt-125m running")
    terminal.tmux("send-keys", "C-c")
    assert terminal.shown("left 0") == ["left 0"]
