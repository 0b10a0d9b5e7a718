"""Let a run save and end for good: `meshwise stop`.

Tested in tests/cli/test_submit.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from meshwise import api
from meshwise.commands.runs import FOLDER, NAME
from meshwise.spec.durations import seconds_of

app = typer.Typer(add_completion=False)


@app.command()
def stop(
    run: Annotated[str, NAME],
    folder: Annotated[str, FOLDER] = "runs",
    wait: Annotated[str, typer.Option(metavar="TIME", help="how long to wait for its end")] = "5min",
) -> None:
    """Let a queued or running run save its state and end, and prevent further starts, on Slurm or this machine.

    \b
    meshwise stop 20261121-140502-gpt        stop the run of this name
    meshwise stop gpt --wait 10min           wait longer, as saving takes long
    meshwise stop gpt --in /shared/me/runs   stop a run of another folder

    Later, meshwise submit RUN or meshwise run --resume RUN continues the run.
    """
    api.stop.stop(Path(folder), run, print, wait=seconds_of(wait, "--wait"))
