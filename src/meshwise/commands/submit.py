"""Send a run to a cluster's queue: `meshwise submit`."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

import typer

from meshwise import api
from meshwise.api.submit import SubmitOptions
from meshwise.commands.command_line import BEHIND, ScriptCommand, from_dataclass, is_script
from meshwise.job.options import RunOptions
from meshwise.records.run_list import SCRIPT, array_of, find_run
from meshwise.schedulers.batch_script import nodes_of
from meshwise.spec.errors import PlanError, UsageError
from meshwise.spec.options import option_name, options_of

BEFORE = "follows the script's name, so the script would get it. Write it before the name."
INSTEAD = "Use more nodes, more time or another plan"
app = typer.Typer(add_completion=False)


@app.command(cls=ScriptCommand, context_settings={"obj": RunOptions, "allow_extra_args": True})
@partial(from_dataclass, hidden=api.submit.NOT_SENT)
def submit(context: typer.Context, cluster: SubmitOptions, options: RunOptions) -> None:
    """Estimate a job or a script, and send it to Slurm. A run that reaches its time limit is started again.

    What is sent is a short batch script around `meshwise run`; --dry-run
    prints it. Options of sbatch follow the last --. A site's defaults are
    read from site.toml: machine, network, devices, gpus, gpu_type,
    gpus_per_node, cpus, memory, partition, account, qos, setup, command,
    container, runtime, mounts, runs, options, secrets.

    \b
    meshwise submit train.py:job --nodes 4 --time 4h
    meshwise submit train.py:job --nodes 2-8 --dry-run -- --partition gpu
    meshwise submit --nodes 2 train.py --lr 0.1 -- --account physics
    meshwise submit runs/20261121-140502-gpt         send a run again
    """
    own, sbatch = _parts(context, options)
    word = str(options.job or "")
    if api.submit.is_run(word):
        run = find_run(Path("runs"), word)
        api.submit.refuse_options_of_runs(context.params)
        if cluster.dry_run:
            sent, task = array_of(run)
            script = sent / SCRIPT
            print(" ".join(["# sbatch", *api.submit.again_words(cluster, sbatch, task), str(script)]))
            print(script.read_text(encoding="utf-8"), end="")
            return
        _say_sent(*api.submit.send_again(run, cluster, sbatch))
        return
    submission = api.submit.prepare(cluster, options, context.params, own, sbatch)
    site = submission.job.site
    sizes, limit = nodes_of(cluster.nodes), cluster.seconds()
    refused = api.submit_gate.verdict(options, own, site, sizes, limit, _say)
    if refused and not cluster.anyway:
        raise PlanError(f"the run was not submitted: {refused}. {INSTEAD}, or submit it all the same with --anyway.")
    if refused:
        _say(f"The run is sent anyway, although {refused}.")
    if cluster.dry_run:
        print(submission.script, end="")
        return
    _say_sent(*api.submit.send(submission))


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _parts(context: typer.Context, options: RunOptions) -> tuple[list[str], list[str]]:
    """Return two lists: the words for the user's script, and the words for sbatch. The words after the last `--` are
    for sbatch."""
    behind: list[str] = context.meta[BEHIND] if is_script(options.job) else ["--", *context.args]
    if "--" not in behind:
        _refuse_ours(behind, BEFORE)
        return behind, []
    at = len(behind) - 1 - behind[::-1].index("--")
    _refuse_ours(behind[at + 1 :], f"stands among the options of sbatch. Write it before {options.job}.")
    _refuse_ours(behind[:at], BEFORE)
    return behind[:at], behind[at + 1 :]


def _refuse_ours(words: list[str], why: str) -> None:
    """Raise UsageError if `words`, which are passed on to the script or to sbatch, contain an option of this command.

    why: the end of the error message, after the option.
    """
    ours = {option_name(name, option) for name, _, option in options_of(SubmitOptions)} - {"--time", "--nodes"}
    for word in words:
        if word.partition("=")[0] in ours:
            raise UsageError(f"{word} {why}")


def _say_sent(script: Path, job: str | None) -> None:
    run = script.parent
    if job is None:
        print(f"This machine has no sbatch. The script is written. Submit it on one that has: sbatch {script}")
        return
    where = "" if run.absolute().parent == Path("runs").absolute() else f" --in {run.parent}"
    print(f"sent        Slurm job {job}\nrecords     {run}\noutput      {run}/slurm-{job}.out")
    print(f"more with   meshwise runs{where}, meshwise logs {run.name} -f{where}")
