"""Show what a run's ranks print, over all its attempts.

Tested in tests/cli/test_submit.py.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from meshwise.records import folder as names
from meshwise.records.metrics import Metrics
from meshwise.records.rank_logs import BEGINS, logs_of
from meshwise.records.run_list import jobs_of
from meshwise.schedulers import slurm
from meshwise.spec.errors import UsageError
from meshwise.spec.words import printable
from meshwise.timeline.views.live_progress import loss_text

ROUND = 0.3  # seconds between two looks
LAST = 15  # lines of what a batch script printed


@dataclass(frozen=True)
class LogLine:
    """A line that a rank printed.

    attempt: the number of the run's attempt, from 1.
    host: the host of the rank. Empty if it is unknown.
    """

    rank: int
    host: str
    attempt: int
    text: str


@dataclass
class _Log:
    """The log file of one rank, which is read while it grows.

    at: how many bytes were read so far.
    rest: the bytes of the last line, if this line is not yet completely written.
    """

    path: Path
    rank: int
    host: str = ""
    attempt: int = 1
    at: int = 0
    rest: bytes = field(default=b"", repr=False)

    def lines(self, began: Sequence[float]) -> Iterator[LogLine]:
        """Yield the lines written since the last call.

        began: when each attempt of the run began, in seconds since 1970.
        """
        with self.path.open("rb") as file:
            file.seek(self.at)
            read = file.read()
        self.at += len(read)
        *whole, self.rest = (self.rest + read).split(b"\n")
        for line in whole:
            text = line.decode(errors="replace")
            if (begins := BEGINS.fullmatch(text)) is not None:
                self.host = begins["host"]
                self.attempt = max(self.attempt, bisect_right(began, float(begins["time"]) + 0.1))
            else:
                yield LogLine(self.rank, self.host, self.attempt, printable(text))


def log_lines(
    folder: Path, ranks: Sequence[int] = (), *, follow: bool = False, look: Callable[[], object] = lambda: None
) -> Iterator[LogLine]:
    """Yield the lines that ranks printed, sorted by attempt and rank. Raises UsageError for a rank without a log.

    ranks: the ranks. By default, all.
    follow: whether to continue with new lines until the run is over.
    look: called whenever there is no new line.
    """
    logs: dict[Path, _Log] = {}
    first = list(_new_lines(folder, logs, ranks))
    yield from sorted(first, key=lambda line: (line.attempt, line.rank))
    missing = sorted(set(ranks) - {log.rank for log in logs.values()})
    if missing and not follow:
        raise UsageError(f"rank {missing[0]} has printed nothing in {folder}. The folder has: {_ranks(folder)}.")
    while follow:
        over = _is_over(folder)  # asked first: what is written until then is shown
        yield from _new_lines(folder, logs, ranks)
        if over:
            return
        look()
        time.sleep(ROUND)


class RunProgress:
    """Reads the progress of a run from the losses that it has written."""

    def __init__(self, folder: Path) -> None:
        self._metrics, self._before, self._shown = Metrics(folder), (0, 0.0), ""

    def line(self) -> str:
        """Return `step 1,200  loss 0.2345  31 steps/s` for the newest step. Return an empty string if there is no step
        yet."""
        self._metrics.read_on()
        if not self._metrics.losses:
            return ""
        step, loss = next(reversed(self._metrics.losses.items()))
        before, at = self._before
        if step != before:
            now = time.monotonic()
            rate = f"  {(step - before) / (now - at):.3g} steps/s" if step > before > 0 else ""
            self._before, self._shown = (step, now), f"step {step:,}  loss {loss_text(loss)}{rate}"
        return self._shown


def batch_output(folder: Path) -> list[tuple[str, str]]:
    """Return the path and the last lines of the newest output file (`slurm-*.out`) of a run's batch script. The list
    has one pair, or is empty if there is no such file."""
    files = sorted(folder.glob("slurm-*.out"), key=lambda path: path.stat().st_mtime)[-1:]
    return [(str(path), "\n".join(_last_lines(path))) for path in files]


def _last_lines(path: Path) -> list[str]:
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - 16_384))
        lines = file.read().decode(errors="replace").splitlines()
    return [printable(line) for line in lines[-LAST:]]


def _new_lines(folder: Path, logs: dict[Path, _Log], ranks: Sequence[int]) -> Iterator[LogLine]:
    began = [session["began"] for session in names.read_run(folder).get("sessions", [])]
    for rank, attempt, path in logs_of(folder):
        if not ranks or rank in ranks:
            yield from logs.setdefault(path, _Log(path, rank, attempt=attempt)).lines(began if attempt == 1 else ())


def _ranks(folder: Path) -> str:
    found = sorted({rank for rank, _, _ in logs_of(folder)})
    return f"ranks {found[0]} to {found[-1]}" if found else "no logs yet"


def _is_over(folder: Path) -> bool:
    facts = names.read_run(folder)
    if slurm.newest(jobs_of(facts)) or facts.get("status") == names.RUNNING:
        return False
    return facts.get("status") != names.QUEUED or slurm.answers()  # a job that left the queue without a start
