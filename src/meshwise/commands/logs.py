"""`meshwise logs`: what the ranks of a run print. Tested in tests/cli/test_submit.py."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from meshwise import api
from meshwise.commands.runs import FOLDER, NAME
from meshwise.records.folder import newest_run
from meshwise.records.run_list import find_run

app = typer.Typer(add_completion=False)


@app.command()
def logs(
    run: Annotated[str | None, NAME] = None,
    folder: Annotated[str, FOLDER] = "runs",
    rank: Annotated[list[int], typer.Option(help="this rank alone; may be repeated")] = [],  # noqa: B006
    follow: Annotated[bool, typer.Option("--follow", "-f", help="go on until the run is over")] = False,
) -> None:
    """Show what the ranks of a run printed, over all its attempts; of the newest run without a name.

    \b
    meshwise logs                          of the newest run
    meshwise logs gpt -f                   as they come, until its end
    meshwise logs gpt --rank 0 --rank 7    of these ranks
    """
    found = newest_run(Path(folder), queued=True) if run is None else find_run(Path(folder), run)
    attempt = 1
    for line in api.logs.log_lines(found, rank, follow=follow):
        if line.attempt != attempt:
            attempt = line.attempt
            print(f"--- attempt {attempt}", flush=True)
        host = f" @ {line.host}" if line.host else ""
        print(f"rank {line.rank}{host}: {line.text}", flush=True)
    for name, last in api.logs.batch_output(found):
        print(f"--- the end of {name}: what the launcher showed\n{last}" if last else f"--- {name}: empty")
