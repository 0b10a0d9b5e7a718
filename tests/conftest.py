"""What every test shares: one thread, fixed random numbers, no GPU test without a GPU, and what a test may start.

A test belongs to one of three loops, by what it asks for:

    make quick    what starts no process, and computes for no seconds
    make test     what starts processes too: it has the fixture `pool` (workers that are kept) or `processes` (its own);
                  and what takes seconds alone: it has the fixture `takes_seconds`
    make suite    what takes long too: it is marked `slow`

Plain `pytest` runs what `make test` runs; a test that is named, or chosen with -k or -m, is run whatever its marks.
"""

import os
import random
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import hypothesis
import numpy as np
import psutil
import pytest
import torch

from meshwise import cli
from meshwise.reports.recorder import current, make_current
from meshwise.training.process.session import end_sessions
from meshwise.workers.fork_server import LISTENS
from tests import fork_server, left_over
from tests.faults import runs
from tests.pool import Pool

# Two cores run several workers at once in many tests: threads that wait for each other would cost more than they bring.
torch.set_num_threads(1)
os.environ.setdefault("OMP_NUM_THREADS", "1")

# A shell that starts `make test &` ignores Ctrl-C for all that follows from it; programs that the tests start must not.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Deadlines measure the machine, not the code. But for a night's run, a failure must come back in the next run.
for name, examples in {"quick": 10, "ci": 25, "suite": 400}.items():
    hypothesis.settings.register_profile(name, deadline=None, derandomize=name != "suite", max_examples=examples)
hypothesis.settings.load_profile("ci")  # --hypothesis-profile names another

BUDGET = {
    "arrays": 60,
    "checker": 75,
    "cli": 30,
    "cuda": 600,  # of `make cuda`
    "docs": 10,
    "examples": 30,
    "faults": 30,
    "hardware": 30,
    "launcher": 5,
    "old": 25,
    "parallel": 50,
    "planner": 60,
    "records": 5,
    "reports": 30,
    "spec": 5,
    "terminal": 5,
    "training": 130,
    "transfer": 30,
    "workers": 80,  # of which a Slurm takes 60, where it is installed
    "": 35,  # the files of no house
}
"""Seconds of the tests of each house in `make test` on two quiet cores. A house over its budget is shown, and fails
nothing."""
NIGHT = frozenset(Path(__file__).with_name("night.txt").read_text(encoding="utf-8").splitlines())
"""Tests of processes that `make test` leaves to `make suite`: bench/night_tests.py chose them."""


@pytest.fixture(autouse=True)
def operators_timed_here(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Operators are timed in a process beside this one only where a test may start one."""
    if "processes" not in request.fixturenames and find_spec("meshwise.planner"):  # see test_houses.py
        timing = import_module("meshwise.planner.timing")
        monkeypatch.setattr(timing, "timed", lambda *call: (*timing.timed_here(*call), ""))


@pytest.fixture(autouse=True)
def fixed_random_numbers() -> None:
    """Every test starts from the same random numbers, whatever ran before it."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def no_program_outlives_its_test() -> Iterator[None]:
    """Each test is a program of its own: its engine is closed, and its spans are nobody else's."""
    before = current()
    yield
    end_sessions()
    make_current(before)


@pytest.fixture(scope="session")
def processes(tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config) -> Iterator[None]:
    """Asked for by a test that starts Python processes, itself or through a command: `make quick` leaves it out."""
    if sys.platform != "linux" or pytestconfig.getoption("hypothesis_profile", None) == "suite":
        yield  # as a user's launches do
        return
    address, server = fork_server.start(tmp_path_factory.mktemp("server"))
    os.environ[LISTENS] = address
    yield
    del os.environ[LISTENS]
    server.kill()
    server.wait()


@pytest.fixture
def own_fork_server(processes: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Asked for by a test that looks for the processes of a launch: they are its descendants, as a user's are."""
    monkeypatch.delenv(LISTENS, raising=False)


@pytest.fixture(autouse=True)
def no_process_outlives_its_test() -> Iterator[None]:
    """A run that a test leaves behind, because it failed, would compute beside all tests that follow."""
    with left_over.killed():
        yield
    while runs.started:
        runs.started.pop().kill()


@pytest.fixture(scope="session")
def takes_seconds() -> None:
    """Asked for by a test that computes for two seconds or more: `make quick` leaves it out."""


@pytest.fixture(scope="session")
def pool(processes: None) -> Iterator[Callable[[int], Pool]]:
    """`pool(3)`: three CPU workers in one process group, started at the first call and kept for later tests, as long
    as the machine has memory left: each keeps what its cases have imported and allocated."""
    pools: dict[int, Pool] = {}

    def of(size: int) -> Pool:
        memory = psutil.virtual_memory()
        if memory.available < memory.total / 2:
            for made in pools.values():
                made.close()
        if size not in pools:
            pools[size] = Pool(size)
        return pools[size]

    yield of
    for made in pools.values():
        made.close()


@pytest.fixture
def command(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[int, str, str]]:
    """`command("checkpoints", "RUN")`: its exit code, and what it prints on stdout and beside it.

    What its processes print counts where the test asks for `capfd`.
    """
    captured = request.getfixturevalue("capfd" if "capfd" in request.fixturenames else "capsys")
    monkeypatch.setenv("COLUMNS", "80")

    def call(*words: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["meshwise", *map(str, words)])
        captured.readouterr()
        with pytest.raises(SystemExit) as end:
            cli.main()
        shown = captured.readouterr()
        return int(end.value.code or 0), shown.out, shown.err

    return call


@pytest.fixture(autouse=True)
def starts_no_process(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A test without the fixture `processes` fails where it starts Python: it would make `make quick` slow."""
    if "processes" in request.fixturenames:
        return
    start = subprocess.Popen.__init__

    def refuse(self: Any, args: Any, *rest: Any, **named: Any) -> None:
        words = [args] if isinstance(args, str | bytes) else [os.fspath(word) for word in args]
        if sys.executable in words:
            pytest.fail("this test starts a Python process: give it the fixture `processes`")
        start(self, args, *rest, **named)

    monkeypatch.setattr(subprocess.Popen, "__init__", refuse)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark what starts processes, skip what needs a GPU where there is none, and leave slow tests to those who ask."""
    for item in items:
        if item.nodeid in NIGHT:
            item.add_marker(pytest.mark.night)
        if "processes" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.workers)
        if "takes_seconds" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.seconds)
        if item.get_closest_marker("gpu") and not torch.accelerator.is_available():
            item.add_marker(pytest.mark.skip(reason="needs an accelerator; torch sees none here"))
    if _nothing_was_chosen(config):
        left = {item for item in items if item.get_closest_marker("slow") or item.get_closest_marker("night")}
        config.hook.pytest_deselected(items=[*left])
        items[:] = [item for item in items if item not in left]


def _nothing_was_chosen(config: pytest.Config) -> bool:
    """Whether pytest was called without a path, -k or -m."""
    named = config.args_source == pytest.Config.ArgsSource.ARGS
    return not (named or config.option.keyword or config.option.markexpr)


# ---- Seconds of each room --------------------------------------------------------------------------------------------

_seconds: Counter[str] = Counter()
_shown: list[str] = []


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Add a test's set-up, call and clean-up to its room, and keep what it shows (`record_property("shown", …)`)."""
    if report.when == "call":
        _shown.extend(str(value) for name, value in report.user_properties if name == "shown")
    parts = Path(report.nodeid.split("::")[0]).parts
    _seconds[parts[1] if len(parts) > 2 else ""] += report.duration


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Show what tests show, and the seconds of each room, where more than one was run."""
    for line in _shown:
        terminalreporter.write_line(line)
    if len(_seconds) < 2:
        return
    terminalreporter.section("seconds of each house, of its budget in `make test`")
    for room, seconds in _seconds.most_common():
        budget = BUDGET.get(room, 0)
        over = "  over its budget" if seconds > budget else ""
        terminalreporter.write_line(f"{room or 'of no room':<12} {seconds:7.1f} {budget:5}{over}")
