"""`meshwise check`: prove that a plan computes what one device computes."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Annotated

import typer
from rich.console import Console

from meshwise.api.check import CheckOptions, check_options
from meshwise.commands.command_line import ScriptCommand, from_dataclass
from meshwise.equivalence.views.check_dict import check_dict
from meshwise.equivalence.views.check_text import check_text

app = typer.Typer()


@app.command(cls=ScriptCommand, context_settings={"obj": CheckOptions})
@from_dataclass
def check(
    context: typer.Context,
    options: CheckOptions,
    as_json: Annotated[bool, typer.Option("--json", help="print every figure as JSON, and nothing else")] = False,
) -> None:
    """Prove that the plan computes what one device computes, or name the first module that does not, and why.

    Exit code 0: equal. 1: different. 2: refused.
    """
    console = Console(stderr=True)

    def notify(text: str) -> None:
        console.print(f"{options.job}  {text}", style="dim", markup=False, highlight=False, soft_wrap=True)

    proof = check_options(replace(options, arguments=context.args, notify=notify))
    if as_json:
        print(json.dumps(check_dict(proof), indent=2))
    else:
        Console().print(check_text(proof), soft_wrap=True)
    raise typer.Exit(0 if proof.equal else 1)
