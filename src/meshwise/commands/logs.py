"""Show what the ranks of a run print: `meshwise logs`.

Tested in tests/cli/test_submit.py.
"""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from meshwise import api
from meshwise.commands.runs import FOLDER, NAME
from meshwise.records.folder import newest_run
from meshwise.records.run_list import find_run

EVERY = 30.0  # seconds between two lines on how far it is, where no terminal is
app = typer.Typer(add_completion=False)


@app.command()
def logs(
    run: Annotated[str | None, NAME] = None,
    folder: Annotated[str, FOLDER] = "runs",
    rank: Annotated[list[int], typer.Option(help="this rank alone; may be repeated")] = [],  # noqa: B006
    follow: Annotated[bool, typer.Option("--follow", "-f", help="go on until the run is over")] = False,
) -> None:
    """Show what the ranks of a run printed, in all its attempts. Without a name, the newest run is shown.

    \b
    meshwise logs                          show the output of the newest run
    meshwise logs gpt -f                   follow the output to its end
    meshwise logs gpt --rank 0 --rank 7    show the output of two ranks
    """
    found = newest_run(Path(folder), queued=True) if run is None else find_run(Path(folder), run)
    attempt, status = 1, _Status(api.logs.RunProgress(found).line)
    for line in api.logs.log_lines(found, rank, follow=follow, look=status.show):
        if line.attempt != attempt:
            attempt = line.attempt
            status.print(f"--- attempt {attempt}")
        host = f" @ {line.host}" if line.host else ""
        status.print(f"rank {line.rank}{host}: {line.text}")
    status.clear()
    for name, last in api.logs.batch_output(found):
        print(f"--- the end of {name}: what the launcher showed\n{last}" if last else f"--- {name}: empty")


class _Status:
    """The line that shows a run's progress. On a terminal, the line stays below the other output, and is redrawn when
    it changes. If the output is not a terminal, a changed line is printed at most once in EVERY seconds."""

    def __init__(self, line: Callable[[], str]) -> None:
        self._line, self._drawn, self._at = line, "", time.monotonic()

    def show(self) -> None:
        if sys.stdout.isatty():
            line = self._line()[: shutil.get_terminal_size().columns - 1]
            if line != self._drawn:
                print(f"\r\x1b[K{line}", end="", flush=True)
                self._drawn = line
        elif time.monotonic() - self._at >= EVERY and (line := self._line()) != self._drawn:
            print(line, flush=True)
            self._drawn, self._at = line, time.monotonic()

    def print(self, text: str) -> None:
        self.clear()
        print(text, flush=True)

    def clear(self) -> None:
        if self._drawn and sys.stdout.isatty():
            print("\r\x1b[K", end="", flush=True)
            self._drawn = ""
