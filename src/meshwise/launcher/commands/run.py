"""Train a job, or run a script, on every device: `meshwise run`."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from meshwise import launcher
from meshwise.spec.errors import UsageError
from meshwise.spec.exit_codes import MEANINGS, WARNINGS, code_of_stop
from meshwise.spec.json_values import json_value
from meshwise.terminal.command_line import ScriptCommand, from_dataclass, is_script
from meshwise.training.job.options import RunOptions
from meshwise.workers.place import place_in

SAMPLE = Path(__file__).parents[2] / "training" / "jobs" / "data" / "mnist" / "SAMPLE.txt"
"""A note on how to get the full MNIST. The file exists only in wheels, which ship just a sample of MNIST."""

EXIT_CODES = "Exit codes: " + "; ".join(f"{code} {meaning}" for code, meaning in MEANINGS.items()) + "."

app = typer.Typer(add_completion=False)


@app.command(cls=ScriptCommand, context_settings={"obj": RunOptions}, epilog=EXIT_CODES)
@from_dataclass
def run(
    context: typer.Context,
    options: RunOptions,
    as_json: Annotated[bool, typer.Option("--json", help="print the summary as JSON, and nothing else")] = False,
) -> None:
    """Train a job on the devices, or run a script on all of them. Words after a script's name are passed to the script.

    Each run gets a folder in runs/ for its losses, weights and saved states, and the output of each worker.

    \b
    meshwise run --devices 2xcpu train.py --lr 0.1   your script, which gets --lr
    meshwise run train.py:job --set shard=4          a Job in your file, sharded
    meshwise run mnist-cnn --devices 4xcpu           a built-in job
    meshwise run train.py:job --plan auto            the plan that is fastest here
    meshwise run --resume runs/20261121-140502-gpt   go on with a stopped run

    A signal (Ctrl-C, SIGTERM, SIGUSR1, SIGUSR2) or --time-limit saves and stops all ranks after the same step.
    """
    if as_json and is_script(options.job):
        raise UsageError(f"--json works only for jobs, and {options.job} is a script. Use meshwise report --json.")
    console = Console(stderr=as_json)
    began = typed()
    if os.getpid() == 1:  # of a container: without a handler, the kernel drops a signal
        for number in WARNINGS:
            signal.signal(number, _end)
    launcher.placing.refuse_running(options)
    if launcher.placing.is_done(options):
        print(f"{options.folder} is finished: nothing is left to do.", file=sys.stderr)
        return
    if is_script(options.job):
        raise typer.Exit(launcher.script.start_script(context.args, options, console, began, _say_starting))
    summary, code = launcher.run.start_job(options, console, began, _say_starting)
    if as_json:
        print(json.dumps(json_value(summary), indent=2))
    raise typer.Exit(code)


def typed() -> float:
    """Return the time when this process started, roughly when the user typed the command, in seconds since 1970.

    It is the present time minus the age of the process. With psutil, which counts from a boot time in whole seconds,
    an attempt could seem to begin before the previous one ended.
    """
    ticks = Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]
    age = time.clock_gettime(time.CLOCK_BOOTTIME) - int(ticks) / os.sysconf("SC_CLK_TCK")
    return time.time() - age


def _end(number: int, frame: object) -> None:
    """End at once, since the run has not begun yet, or is over."""
    os._exit(code_of_stop(number))


def _say_starting(options: RunOptions) -> None:
    if options.node_rank and place_in(os.environ).one_a_node:  # nodes under srun share one output: only node 0 prints
        return
    if str(options.job).startswith("mnist-") and "data=" not in str(options.args) and SAMPLE.exists():
        print(f"Note: {SAMPLE.read_text(encoding='utf-8')}", end="", file=sys.stderr)
    print(f"starting    {' '.join((options.devices or 'the workers').split())[:80]}", file=sys.stderr, flush=True)
