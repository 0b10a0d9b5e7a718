"""Show what the ranks of a run print: `meshwise logs`."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import typer

from meshwise.launcher.commands.runs import FOLDER, NAME
from meshwise.launcher.engines import kubectl, slurm
from meshwise.records import folder as names
from meshwise.records.attempts import BEGINS, logs_of
from meshwise.records.metrics import Metrics
from meshwise.records.run_list import find_run, jobs_of
from meshwise.reports.views.live_progress import loss_text
from meshwise.spec.errors import UsageError
from meshwise.spec.words import printable

ROUND = 0.3  # seconds between two polls
EVERY = 15.0  # seconds between two progress lines
LAST = 15  # how many lines of a batch script's output to show
Line = tuple[int, int, str, str]
"""A line that a rank printed: the attempt's number, the rank, its host ("" if unknown), the text."""
app = typer.Typer(add_completion=False)


@app.command()
def logs(
    run: Annotated[str | None, NAME] = None,
    folder: Annotated[str, FOLDER] = "runs",
    rank: Annotated[list[int], typer.Option(help="show only this rank; may be repeated")] = [],  # noqa: B006
    follow: Annotated[bool, typer.Option("--follow", "-f", help="follow until the run ends")] = False,
) -> None:
    """Show what the ranks of a run printed, in all its attempts. Without a name, the newest run is shown.

    \b
    meshwise logs                          show the output of the newest run
    meshwise logs gpt -f                   follow the output to its end
    meshwise logs gpt --rank 0 --rank 7    show the output of two ranks
    """
    found = names.newest_run(Path(folder), queued=True) if run is None else find_run(Path(folder), run)
    facts = names.read_run(found)
    load = kubectl.workload_of(jobs_of(facts))
    if load is not None and facts.get("status") == names.QUEUED:  # not begun, or its folder is seen by pods alone
        if rank:
            raise UsageError(f"--rank {rank[0]}: {found} has no logs of ranks. Without --rank, kubectl shows its pods.")
        for text in kubectl.output(load, follow=follow):
            print(printable(text), flush=True)
        return
    shown = 1
    for attempt, number, host, text in _log_lines(found, rank, follow, _progress(found)):
        if attempt != shown:
            shown = attempt
            print(f"--- attempt {attempt}", flush=True)
        print(f"rank {number}{f' @ {host}' if host else ''}: {text}", flush=True)
    for output in sorted(found.glob("slurm-*.out"), key=lambda path: path.stat().st_mtime)[-1:]:
        with output.open(encoding="utf-8", errors="replace") as file:
            last = "\n".join(printable(line.rstrip("\n")) for line in deque(file, LAST))
        print(f"--- the end of {output}: what the launcher showed\n{last}" if last else f"--- {output}: empty")


@dataclass
class _Log:
    """The log file of one rank, which is read while it grows.

    at: how many bytes were read so far.
    rest: the bytes of the last line, if this line is not yet completely written.
    """

    path: Path
    rank: int
    attempt: int
    host: str = ""
    at: int = 0
    rest: bytes = field(default=b"", repr=False)

    def lines(self) -> Iterator[Line]:
        """Yield the lines written since the last call."""
        with self.path.open("rb") as file:
            file.seek(self.at)
            read = file.read()
        self.at += len(read)
        *whole, self.rest = (self.rest + read).split(b"\n")
        for line in whole:
            text = line.decode(errors="replace")
            if (begins := BEGINS.fullmatch(text)) is not None:
                self.host = begins["host"]
            else:
                yield self.attempt, self.rank, self.host, printable(text)


def _log_lines(folder: Path, ranks: Sequence[int], follow: bool, look: Callable[[], object]) -> Iterator[Line]:
    """Yield the lines that ranks printed, sorted by attempt and rank. Raises UsageError for a rank without a log.

    ranks: the ranks. If empty, all.
    follow: whether to continue with new lines until the run is over.
    look: called whenever there is no new line.
    """
    logs: dict[Path, _Log] = {}
    first = list(_new_lines(folder, logs, ranks))
    yield from sorted(first, key=lambda line: line[:2])
    missing = sorted(set(ranks) - {log.rank for log in logs.values()})
    if missing and not follow:
        raise UsageError(f"rank {missing[0]} has printed nothing in {folder}.")
    while follow:
        over = _is_over(folder)  # checked before the lines are read, so that no line is missed
        yield from _new_lines(folder, logs, ranks)
        if over:
            return
        look()
        time.sleep(ROUND)


def _progress(folder: Path) -> Callable[[], None]:
    """Return a function that prints a line such as `step 1,200  loss 0.2345`, at most once in EVERY seconds."""
    metrics, at, shown = Metrics(folder), time.monotonic(), ""

    def look() -> None:
        nonlocal at, shown
        if time.monotonic() - at < EVERY:
            return
        at = time.monotonic()
        metrics.read_on()
        for step, loss in [*metrics.losses.items()][-1:]:
            before, shown = shown, f"step {step:,}  loss {loss_text(loss)}"
            if shown != before:
                print(shown, flush=True)

    return look


def _new_lines(folder: Path, logs: dict[Path, _Log], ranks: Sequence[int]) -> Iterator[Line]:
    for rank, attempt, path in logs_of(folder):
        if not ranks or rank in ranks:
            yield from logs.setdefault(path, _Log(path, rank, attempt)).lines()


def _is_over(folder: Path) -> bool:
    facts = names.read_run(folder)
    jobs = jobs_of(facts)
    if load := kubectl.workload_of(jobs):
        state = kubectl.states([load]).get(load)
        return facts.get("status") != names.RUNNING if state is None else state.is_over
    if slurm.newest(jobs) or facts.get("status") == names.RUNNING:
        return False
    return facts.get("status") != names.QUEUED or slurm.answers()  # if squeue does not answer, the run may still start
