"""List and rank a job's plans on a machine: `meshwise plan`.

No training run is needed for that.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from meshwise import planner
from meshwise.planner.estimate import FITS
from meshwise.planner.options import PlanOptions
from meshwise.planner.views.plan_text import first_text, plans_dict, plans_text
from meshwise.records.files import write_text
from meshwise.spec.errors import PlanError
from meshwise.spec.plan_file import plan_to_toml
from meshwise.spec.plan_settings import settings_text
from meshwise.spec.prediction import prediction_to_toml
from meshwise.spec.units import plural
from meshwise.terminal.command_line import ScriptCommand, from_dataclass

app = typer.Typer(add_completion=False)


@app.command(cls=ScriptCommand, context_settings={"obj": PlanOptions})
@from_dataclass
def plan(
    context: typer.Context,
    options: PlanOptions,
    save: Annotated[Path | None, typer.Option("--save", help="write the best plan to a file", metavar="FILE")] = None,
    page: Annotated[Path | None, typer.Option("--page", help="write a page that works offline", metavar="FILE")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print every figure as JSON, and nothing else")] = False,
) -> None:
    """Rank the plans that a job could have on a machine: step time and memory of each, before anything runs.

    Exit codes: 0 if a plan fits, 1 if no plan is certain to fit, 2 if the options or the job are refused. With --fits,
    the code is 0 only if the given plan is certain to fit.

    \b
    meshwise plan gpt --machine 8xH100              ranked plans
    meshwise plan --machine 8xH100 train.py --epochs 1    of your script
    meshwise plan gpt --machine 8xH100 --explain    what the best one's step takes
    meshwise plan gpt --machine 1xH100 --memory     what its memory goes to
    meshwise plan train.py:job --machine 8xH100 --save plan.toml
    meshwise plan train.py:job --machine 8xH100 --fits plan.toml
    """
    console = Console(stderr=True)
    with console.status("rehearsing") as status:

        def show(part: Any) -> None:
            if part.found.first and not (part.found.estimates or part.found.refused or as_json):
                console.print(first_text(part), markup=False, highlight=False, soft_wrap=True)
            done = len(part.found.estimates) + len(part.found.refused)
            status.update(f"rehearsed {plural(done, 'plan')} of {done + len(part.found.left)}")

        plans = planner.plan.plan_options(replace(options, arguments=context.args, show=show))
    if as_json:
        print(json.dumps(plans_dict(plans), indent=2))
    else:
        out = Console()
        out.print(plans_text(plans, out.width if out.is_terminal else None), soft_wrap=True)
    if page is not None:
        write_text(page, str(planner.plan.page(plans).html))
        console.print(f"wrote {page}", markup=False, highlight=False)
    best = plans.best
    if save is not None:
        if best is None:
            raise PlanError(f"--save {save}: no plan is saved, because none is certain to fit. Use more devices.")
        predicted = plans.predicted
        write_text(save, plan_to_toml(best.plan) + ("" if predicted is None else prediction_to_toml(predicted)))
        console.print(f"saved {settings_text(best.plan)} to {save}", markup=False, highlight=False)
    sure = options.fits is None or (best is not None and best.memory.verdict == FITS)
    raise typer.Exit(0 if options.memory or (best is not None and sure) else 1)
