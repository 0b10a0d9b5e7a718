"""`meshwise check`: prove that a plan computes what one device computes."""

from __future__ import annotations

import json
from typing import Annotated

import typer
from rich.console import Console

from meshwise.api.check import check as check_plan
from meshwise.api.check import plan_of_words
from meshwise.commands.script_command import ScriptCommand, is_script
from meshwise.equivalence.views.check_dict import check_dict
from meshwise.equivalence.views.check_text import check_text
from meshwise.jobs.script import refuse_job_options

app = typer.Typer()


@app.command(cls=ScriptCommand)
def check(
    context: typer.Context,
    job: Annotated[
        str,
        typer.Argument(help="mnist-mlp, mnist-cnn, mlp, gpt[:size], file.py:name, or a script.py and its arguments"),
    ],
    plan: Annotated[
        str | None, typer.Option(metavar="FILE", help="a plan file; default: replicas on all devices")
    ] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="FIELD=VALUE", help="a field of the plan, such as shard=4")
    ] = None,
    devices: Annotated[
        str | None, typer.Option(help="4xcpu, 2xcuda; default: a CPU worker for each device of the plan, else 2xcpu")
    ] = None,
    steps: Annotated[int, typer.Option(help="optimizer steps; the last one has a ragged batch")] = 3,
    batch_size: Annotated[int | None, typer.Option(help="samples of the global batch, over all devices")] = None,
    seed: Annotated[int | None, typer.Option(help="seed of the start values, the data order and the draws")] = None,
    data: Annotated[str | None, typer.Option(help="another data set in the same format: a folder")] = None,
    rounding: Annotated[bool, typer.Option(help="run both sides in the plan's own precision too")] = True,
    as_json: Annotated[bool, typer.Option("--json", help="print every figure as JSON, and nothing else")] = False,
) -> None:
    """Prove that the plan computes what one device computes, or name the first module that does not, and why.

    Exit code 0: equal. 1: different. 2: refused.
    """
    console = Console(stderr=True)
    script = is_script(job)
    if script:
        refuse_job_options(job, {"batch_size": batch_size, "data": data})
    said = plan is not None or settings
    chosen = plan_of_words(plan, settings or [], devices) if said or not script else None
    proof = check_plan(
        job,
        plan=chosen,
        devices=devices,
        steps=steps,
        batch_size=batch_size,
        seed=seed,
        data=data,
        rounding=rounding,
        arguments=context.args,
        tell=lambda text: console.print(f"{job}  {text}", style="dim", markup=False, highlight=False, soft_wrap=True),
    )
    if as_json:
        print(json.dumps(check_dict(proof), indent=2))
    else:
        Console().print(check_text(proof), soft_wrap=True)
    raise typer.Exit(0 if proof.equal else 1)
