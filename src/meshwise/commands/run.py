"""`meshwise run`: train a job, or run a script, on every device."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import psutil
import typer
from rich.console import Console

from meshwise.api.run import run_request, run_script
from meshwise.jobs.script import refuse_job_options
from meshwise.spec.errors import UsageError
from meshwise.timeline.run_summary import summary_dict
from meshwise.training.block_spans import BLOCKS
from meshwise.training.own_plan import plan_text
from meshwise.training.request import RunRequest, check_said_once
from meshwise.workers.nodes import NodeOptions

app = typer.Typer()


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def run(
    context: typer.Context,
    job: Annotated[
        str | None,
        typer.Argument(
            help="mnist-mlp, mnist-cnn, mlp, gpt[:size], file.py:name, or an own-loop script.py and its arguments"
        ),
    ] = None,
    devices: Annotated[
        str | None, typer.Option(help="all, 4xcpu, 2xcuda or cuda:0,1; default: all accelerators, else one CPU worker")
    ] = None,
    epochs: Annotated[int | None, typer.Option(help="epochs to train")] = None,
    batch_size: Annotated[int | None, typer.Option(help="samples of the global batch, over all devices")] = None,
    accumulate: Annotated[int | None, typer.Option(help="microbatches that make a step")] = None,
    precision: Annotated[str | None, typer.Option(help="fp32, bf16, fp16 or fp64")] = None,
    seed: Annotated[int | None, typer.Option(help="of the start values, the data order and the random draws")] = None,
    data: Annotated[str | None, typer.Option(help="another data set in the same format: a folder")] = None,
    log_every: Annotated[int | None, typer.Option(help="steps between log lines")] = None,
    save_every: Annotated[int | None, typer.Option(help="steps between saved states")] = None,
    plan: Annotated[str | None, typer.Option(metavar="FILE", help="a plan file; default: replicas")] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="FIELD=VALUE", help="a field of the plan: recompute=full")
    ] = None,
    exact_random: Annotated[
        bool, typer.Option("--exact-random", help="dropout as on one device, on any number of them; slower")
    ] = False,
    resume: Annotated[str | None, typer.Option(metavar="RUN", help="go on with a stopped run: its folder")] = None,
    out: Annotated[str, typer.Option(help="where run folders are made")] = "runs",
    as_json: Annotated[bool, typer.Option("--json", help="print the summary as JSON, and nothing else")] = False,
    nnodes: Annotated[int, typer.Option(help="machines of this run")] = 1,
    node_rank: Annotated[int, typer.Option(help="which of them this is, from 0")] = 0,
    rdzv: Annotated[str | None, typer.Option(metavar="HOST:PORT", help="where machine 0 is reached")] = None,
    blocks: Annotated[bool, typer.Option(help="record each block of the model: about 30 µs a block")] = False,
) -> None:
    """Train a job on the devices, or run a script that keeps its own loop on all of them.

    Plan, train, evaluate, record: the folder runs/… keeps losses, weights, states and what each worker printed.
    """
    console = Console(stderr=as_json)
    script = job is not None and job.endswith(".py")
    if not script and context.args:
        raise UsageError(f"'{' '.join(context.args)}' is no option of a job. See meshwise run --help.")
    machines = NodeOptions(nnodes=nnodes, node_rank=node_rank, rdzv=rdzv)
    began: float = psutil.Process().create_time()  # when the command was typed, near enough
    if blocks:
        os.environ[BLOCKS] = "1"  # workers inherit it, whatever they run
    asked = RunRequest(job, devices, epochs, batch_size, accumulate, precision, seed, data, log_every, save_every)
    # The run's record keeps the text, so that a resumed run needs no file.
    asked = replace(asked, plan=None if plan is None else plan_text(plan), exact_random=exact_random or None)
    asked = replace(asked, settings=" ".join(settings) if settings else None)
    check_said_once(asked)
    if script and job is not None:
        refuse_job_options(job, {**_of_a_job(asked), "resume": resume or None})
        where = Path(out)
        code = run_script(Path(job), context.args, console, request=asked, out=where, machines=machines, began=began)
        raise typer.Exit(code)
    summary, code = run_request(asked, console, resume=resume, out=out, machines=machines, began=began)
    if as_json:
        print(json.dumps(summary_dict(summary), indent=2))
    raise typer.Exit(code)


def _of_a_job(asked: RunRequest) -> dict[str, object]:
    return {name: value for name, value in vars(asked).items() if name not in ("job", "devices", "plan", "settings")}
