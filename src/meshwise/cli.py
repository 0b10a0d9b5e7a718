"""The command line: few verbs, errors as one sentence, exit codes that mean something.

0    done
1    a worker failed, or the loss is not a number any more
2    what was asked cannot be: the sentence says what to write instead
130  stopped by Ctrl-C (143: by SIGTERM); the state is saved
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from functools import partial
from pathlib import Path
from typing import Annotated

import psutil
import typer
from rich.console import Console

from meshwise import api
from meshwise.spec.errors import MeshwiseError, UsageError, WorkerFailed
from meshwise.timeline.compare import comparison_dict
from meshwise.timeline.report import report_dict
from meshwise.timeline.views.compare_text import compare_text
from meshwise.timeline.views.follow import follow
from meshwise.timeline.views.mermaid import mermaid_gantt
from meshwise.timeline.views.summary_text import summary_dict
from meshwise.timeline.views.text import report_text
from meshwise.training.block_spans import BLOCKS
from meshwise.training.request import RunRequest

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Many devices work as one for PyTorch: train on all of them with the numbers of one, and see where time went.",
)


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
    seed: Annotated[
        int | None, typer.Option(help="seed of the start values, the data order and the random draws")
    ] = None,
    data: Annotated[str | None, typer.Option(help="another data set in the same format: a folder")] = None,
    log_every: Annotated[int | None, typer.Option(help="steps between log lines")] = None,
    save_every: Annotated[int | None, typer.Option(help="steps between saved states")] = None,
    resume: Annotated[str | None, typer.Option(metavar="RUN", help="go on with a stopped run: its folder")] = None,
    out: Annotated[str, typer.Option(help="where run folders are made")] = "runs",
    as_json: Annotated[
        bool, typer.Option("--json", help="print the summary as JSON, and nothing else, on stdout")
    ] = False,
    nnodes: Annotated[int, typer.Option(help="machines of this run")] = 1,
    node_rank: Annotated[int, typer.Option(help="which of them this is, from 0")] = 0,
    rdzv: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="where machine 0 is reached by the others")
    ] = None,
    blocks: Annotated[bool, typer.Option(help="record each block of the model: about 30 µs a block")] = False,
) -> None:
    """Train a job on the devices, or run a script that keeps its own loop on all of them.

    Plan, train, evaluate, record: the folder runs/… keeps losses, weights, states and what each worker printed.
    """
    console = Console(stderr=as_json)
    script = job is not None and job.endswith(".py")
    if not script and context.args:
        raise UsageError(f"'{' '.join(context.args)}' is no option of a job. See meshwise run --help.")
    machines = api.Machines(nnodes, node_rank, rdzv)
    began: float = psutil.Process().create_time()  # when the command was typed, near enough
    if blocks:
        os.environ[BLOCKS] = "1"  # workers inherit it, whatever they run
    asked = RunRequest(job, devices, epochs, batch_size, accumulate, precision, seed, data, log_every, save_every)
    if script and job is not None:
        _refuse_job_options(asked, resume)
        code = api.run_script(
            Path(job), context.args, console, devices=devices, out=Path(out), machines=machines, began=began
        )
        raise typer.Exit(code)
    summary, code = api.run_request(asked, console, resume=resume, out=out, machines=machines, began=began)
    if as_json:
        print(json.dumps(summary_dict(summary), indent=2))
    raise typer.Exit(code)


@app.command()
def report(
    folder: Annotated[
        str | None, typer.Argument(metavar="RUN", help="the folder of a run; default: the newest in runs")
    ] = None,
    other: Annotated[str | None, typer.Argument(metavar="RUN2", help="a run to compare it with")] = None,
    html: Annotated[bool, typer.Option("--html", help="write one page that works offline: report.html")] = False,
    trace: Annotated[bool, typer.Option("--trace", help="write trace.json.gz for Perfetto")] = False,
    openmetrics: Annotated[bool, typer.Option("--openmetrics", help="write metrics.prom for Prometheus")] = False,
    tensorboard: Annotated[bool, typer.Option("--tensorboard", help="write TensorBoard events")] = False,
    to: Annotated[str | None, typer.Option(metavar="DIR", help="where files are written; default: RUN")] = None,
    mermaid: Annotated[bool, typer.Option("--mermaid", help="print the Gantt chart of a step for Markdown")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="print every number as JSON")] = False,
    live: Annotated[bool, typer.Option("--live", help="follow a run that goes on")] = False,
    steps: Annotated[str | None, typer.Option(metavar="A:B", help="show these steps span by span")] = None,
) -> None:
    """Say what limited a run, and show where its time and memory went. With two runs, compare them."""
    console, run = Console(), api.run_folder(folder)
    span = api.step_range(steps)
    place = Path(to) if to else run
    forms = {"--html": html, "--trace": trace, "--openmetrics": openmetrics, "--tensorboard": tensorboard}
    forms |= {"--mermaid": mermaid, "--json": as_json, "--live": live, "--steps": steps is not None}
    _refuse_together([name for name, wanted in forms.items() if wanted], other)
    if live:
        write = partial(api.report_files, run, place, ["openmetrics"], None)
        follow(run, console, beside=write if openmetrics else None)
    elif other is not None:
        compared = api.compare(run, other)
        if as_json:
            print(json.dumps(comparison_dict(compared), indent=2))
        else:
            console.print(compare_text(compared, None), soft_wrap=True)
    else:
        asked = {"html": html, "trace": trace, "openmetrics": openmetrics, "tensorboard": tensorboard}
        kinds = [kind for kind, wanted in asked.items() if wanted]
        found, written = api.report_files(run, place, kinds, span)
        if as_json:
            print(json.dumps(report_dict(found), indent=2))
        elif mermaid:
            print(mermaid_gantt(found))
        elif not written:
            console.print(report_text(found))
        for path in written:
            print(f"written     {path}", file=sys.stderr if as_json or mermaid else sys.stdout)


def _refuse_together(forms: list[str], other: str | None) -> None:
    """What cannot be had at once is said, not left out."""
    if other is not None and set(forms) - {"--json"}:
        raise UsageError(f"RUN2 and {', '.join(forms)}: two runs are compared as text or with --json alone.")
    if "--live" in forms and set(forms) - {"--live", "--openmetrics"}:
        raise UsageError(f"{', '.join(forms)}: --live goes with --openmetrics alone.")
    if {"--mermaid", "--json"} <= set(forms):
        raise UsageError("--mermaid and --json both print: choose one.")


def _refuse_job_options(asked: RunRequest, resume: str | None) -> None:
    """Options of a job say nothing to a script that keeps its own loop."""
    said = {name: value for name, value in vars(asked).items() if value is not None} | (
        {"resume": resume} if resume else {}
    )
    for name in said.keys() - {"job", "devices"}:
        option = f"--{name.replace('_', '-')} {said[name]}"
        raise UsageError(
            f"{option}: {asked.job} keeps its own loop. Write its own options behind its name, or make a Job."
        )


def main() -> None:
    """The command `meshwise`."""
    try:
        code = app(script_arguments_apart(sys.argv[1:]), standalone_mode=False)
    except MeshwiseError as error:
        _say(error)
        code = error.exit_code
    except typer.Exit as exit:
        code = exit.exit_code
    except Exception as error:
        if not hasattr(error, "format_message") or not hasattr(error, "exit_code"):
            raise
        _say(UsageError(f"{error.format_message()} See meshwise --help."))
        code = error.exit_code
    _flush()
    sys.exit(code)


LAUNCH_FLAGS = ("--blocks",)
LAUNCH_OPTIONS = ("--devices", "--out", "--nnodes", "--node-rank", "--rdzv")


def script_arguments_apart(words: list[str]) -> list[str]:
    """`words` with a `--` before the arguments of an own-loop script, so that its options are not taken for ours.

    Options of the launcher are ours before the script's name and directly behind it.
    """
    values = (
        i
        for i, word in enumerate(words)
        if word.endswith(".py") and not word.startswith("-") and not (i and words[i - 1] in LAUNCH_OPTIONS)
    )
    at = next(values, None)
    if at is None:
        return words
    end = at + 1
    while end < len(words) and words[end].split("=")[0] in (*LAUNCH_OPTIONS, *LAUNCH_FLAGS):
        end += 1 if "=" in words[end] or words[end] in LAUNCH_FLAGS else 2
    rest = words[end:]
    return [*words[:end], *(rest if rest[:1] == ["--"] else ["--", *rest])]


def _say(error: MeshwiseError) -> None:
    text = str(error)
    if text:
        name = "" if isinstance(error, WorkerFailed) else f"{type(error).__name__}: "
        with contextlib.suppress(OSError):  # the terminal may be gone
            print(f"{name}{text}", file=sys.stderr, flush=True)


def _flush() -> None:
    """Flush what is printed, even when nobody reads it any more."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
