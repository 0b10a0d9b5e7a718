"""Prove that a plan computes what one device does: `meshwise check`."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from meshwise import checker
from meshwise.checker import views
from meshwise.checker.options import PRELOAD_OF_CHECK, CheckOptions
from meshwise.spec.errors import MeshwiseError, check_known
from meshwise.spec.exit_codes import AGAIN, DONE, FAILED, NOT_JUDGED, USAGE
from meshwise.spec.json_values import json_value
from meshwise.spec.options import check_script
from meshwise.spec.units import plural
from meshwise.terminal.command_line import ScriptCommand, from_dataclass, is_script
from meshwise.workers.fork_server import Forks

LONGEST_NAME = 80
app = typer.Typer(add_completion=False)


@app.command(cls=ScriptCommand, context_settings={"obj": CheckOptions})
@from_dataclass
def check(
    context: typer.Context,
    options: CheckOptions,
    as_json: Annotated[bool, typer.Option("--json", help="print every figure as JSON, and nothing else")] = False,
    accept: Annotated[
        list[str] | None,
        typer.Option("--accept", metavar="WORDS", help="what may be not judged, such as 'local steps': exit code 0"),
    ] = None,
    annotate: Annotated[
        str, typer.Option("--format", metavar="github", help="github: annotate lines in GitHub Actions too")
    ] = "text",
    static: Annotated[
        bool, typer.Option("--static", help="look for six mistakes in the source of a script, without running it")
    ] = False,
) -> None:
    """Prove that the plan computes what one device computes, or name the first module that does not, and why.

    Exit code 0: equal. 1: different. 2: no verdict, because the plan is refused or the program fails. 4: not judged in
    all. Nothing differs in float64, but something was not compared, or differs otherwise, such as a printed number.

    \b
    meshwise check --devices 3xcpu train.py     your script, on three workers
    meshwise check train.py:job --set shard=4   a Job under any plan
    meshwise check gpt --plan plan.toml --json  print all figures as JSON
    """
    check_known("--format", annotate, ("text", "github"))
    if is_script(options.job):
        check_script(str(options.job), options)
    if static:
        raise typer.Exit(_look_for_mistakes(Path(str(options.job)), as_json, annotate))
    with _progress_shown(str(options.job)) as (notify, progress), closing(Forks(PRELOAD_OF_CHECK)) as forks:
        notify(f"a check of {plural(options.steps, 'step')}")  # printed first, since importing torch takes time
        if "torch" not in sys.modules:
            forks.server(os.environ)  # started now, so that the server imports torch while this process does
        options = replace(options, arguments=context.args, notify=notify, progress=progress)
        try:
            proof = checker.check.check_options(options, forks)
        except MeshwiseError as error:  # exit codes 1 and 4 are verdicts, so an error exits with 2
            error.exit_code = USAGE if error.exit_code < AGAIN else error.exit_code
            raise
    if as_json:
        print(json.dumps(views.check_dict.check_dict(proof), indent=2))
    else:
        Console().print(views.check_text.check_text(proof), soft_wrap=True)
        for line in views.check_github.github_lines(proof.findings, proof.not_judged) if annotate == "github" else ():
            print(line)
    accepted = all(any(words and words in text for words in accept or ()) for text in proof.not_judged)
    not_judged = DONE if accepted else NOT_JUDGED
    raise typer.Exit({"equal": DONE, "not judged": not_judged, "different": FAILED}[proof.verdict.value])


def _look_for_mistakes(script: Path, as_json: bool, annotate: str) -> int:
    """Show what the rules on the source find, and return the exit code."""
    found = list(checker.source_rules.mistakes_in(script))
    if as_json:
        print(json.dumps({"findings": json_value(found)}, indent=2))
        return FAILED if found else DONE
    for each in found:
        print(f"{each.places[0]}: {each.kind}. {each.evidence} {each.instead}".strip())
    print(f"{plural(len(found), 'finding')} in the source alone. This proves nothing: meshwise check {script} does.")
    for line in views.check_github.github_lines(found) if annotate == "github" else ():
        print(line)
    return FAILED if found else DONE


@contextmanager
def _progress_shown(job: str) -> Iterator[tuple[Callable[[str], None], Callable[[str], None]]]:
    """Yield two functions for output. The first prints a line. The second shows the present progress on a terminal, as
    a status line that changes."""
    job = job if len(job) <= LONGEST_NAME else f"…{job[-LONGEST_NAME:]}"
    console = Console(stderr=True)

    def line(text: str) -> None:
        console.print(f"{job}  {text}", style="dim", markup=False, highlight=False, soft_wrap=True)

    with console.status("checking") as status:  # a status is drawn only on a terminal
        yield line, status.update
