"""`meshwise check`: prove that a plan computes what one device computes."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Annotated

import typer
from rich.console import Console

from meshwise import api
from meshwise.api.check_options import CheckOptions
from meshwise.commands.command_line import ScriptCommand, from_dataclass
from meshwise.equivalence import views

app = typer.Typer(add_completion=False)


@app.command(cls=ScriptCommand, context_settings={"obj": CheckOptions})
@from_dataclass
def check(
    context: typer.Context,
    options: CheckOptions,
    as_json: Annotated[bool, typer.Option("--json", help="print every figure as JSON, and nothing else")] = False,
) -> None:
    """Prove that the plan computes what one device computes, or name the first module that does not, and why.

    Exit code 0: equal. 1: different. 2: refused.

    \b
    meshwise check --devices 3xcpu train.py     your script, three workers
    meshwise check train.py:job --set shard=4   a Job under any plan
    meshwise check gpt --plan plan.toml --json  every figure
    """
    console = Console(stderr=True)

    def notify(text: str) -> None:
        console.print(f"{options.job}  {text}", style="dim", markup=False, highlight=False, soft_wrap=True)

    proof = api.check.check_options(replace(options, arguments=context.args, notify=notify))
    if as_json:
        print(json.dumps(views.check_dict.check_dict(proof), indent=2))
    else:
        Console().print(views.check_text.check_text(proof), soft_wrap=True)
    raise typer.Exit(0 if proof.equal else 1)
