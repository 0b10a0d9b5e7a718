"""`meshwise run`: train a job, or run a script, on every device."""

from __future__ import annotations

import json
from typing import Annotated

import psutil
import typer
from rich.console import Console

from meshwise.api.run import start_job, start_script
from meshwise.commands.command_line import ScriptCommand, from_dataclass, is_script
from meshwise.timeline.run_summary import summary_dict
from meshwise.training.run_options import RunOptions

app = typer.Typer()


@app.command(cls=ScriptCommand, context_settings={"obj": RunOptions})
@from_dataclass
def run(
    context: typer.Context,
    options: RunOptions,
    as_json: Annotated[bool, typer.Option("--json", help="print the summary as JSON, and nothing else")] = False,
) -> None:
    """Train a job on the devices, or run a script on all of them; what follows the script's name is its own.

    Plan, train, evaluate, record: the folder runs/… keeps losses, weights, states and what each worker printed.
    """
    console = Console(stderr=as_json)
    began: float = psutil.Process().create_time()  # when the command was typed, near enough
    if is_script(options.job):
        raise typer.Exit(start_script(context.args, options, console, began))
    summary, code = start_job(options, console, began)
    if as_json:
        print(json.dumps(summary_dict(summary), indent=2))
    raise typer.Exit(code)
