"""Show what the ranks of a run print: `meshwise logs`."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
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
    missing = sorted(set(rank) - {number for number, _, _ in logs_of(found)})
    if missing and not follow:
        raise UsageError(f"rank {missing[0]} has printed nothing in {found}.")
    shown = 1
    for attempt, number, host, text in _log_lines(found, rank, follow):
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
    """

    path: Path
    rank: int
    attempt: int
    host: str = ""
    at: int = 0

    def lines(self) -> Iterator[Line]:
        """Yield the lines written since the last call."""
        with self.path.open("rb") as file:
            file.seek(self.at)
            for line in file:
                if not line.endswith(b"\n"):  # not yet completely written
                    return
                self.at += len(line)
                text = line[:-1].decode(errors="replace")
                if (begins := BEGINS.fullmatch(text)) is not None:
                    self.host = begins["host"]
                else:
                    yield self.attempt, self.rank, self.host, printable(text)


def _log_lines(folder: Path, ranks: Sequence[int], follow: bool) -> Iterator[Line]:
    """Yield the lines that ranks printed, sorted by attempt and rank. In between, show how far the run is.

    ranks: the ranks. If empty, all.
    follow: whether to continue with new lines until the run is over.
    """
    logs: dict[Path, _Log] = {}
    metrics, told = Metrics(folder), time.monotonic()
    while True:
        over = not follow or _is_over(folder)  # checked before the lines are read, so that no line is missed
        yield from sorted(_new_lines(folder, logs, ranks), key=lambda line: line[:2])
        if over:
            return
        if time.monotonic() - told >= EVERY:
            told = time.monotonic()
            _show_progress(metrics)
        time.sleep(ROUND)


def _show_progress(metrics: Metrics) -> None:
    """Print a line such as `step 1,200  loss 0.2345`, if the run has come further."""
    before = len(metrics.losses)
    if len(metrics.read_on().losses) != before and metrics.losses:
        step, loss = [*metrics.losses.items()][-1]
        print(f"step {step:,}  loss {loss_text(loss)}", flush=True)


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
