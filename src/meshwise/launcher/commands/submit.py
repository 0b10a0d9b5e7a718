"""Send a run to a cluster's queue: `meshwise submit`."""

from __future__ import annotations

import math
import re
import sys
from functools import partial
from pathlib import Path

import typer

from meshwise import hardware, launcher, planner
from meshwise.launcher.engines import kubectl, ray
from meshwise.launcher.engines.batch_script import batch_script, nodes_of
from meshwise.launcher.engines.kubernetes import INSTANCE
from meshwise.launcher.engines.manifest import manifest
from meshwise.launcher.engines.site import OF_SLURM, Site
from meshwise.launcher.submit import SubmitOptions
from meshwise.planner.estimate import FITS, UNKNOWN
from meshwise.planner.options import PlanOptions
from meshwise.planner.views.plan_text import plans_text
from meshwise.records.run_list import MANIFEST, find_run
from meshwise.spec.devices import parse_devices
from meshwise.spec.errors import MeshwiseError, PlanError, UsageError
from meshwise.spec.options import check_script
from meshwise.spec.plan_settings import settings_text
from meshwise.spec.units import plural, seconds_text
from meshwise.terminal.command_line import BEHIND, ScriptCommand, from_dataclass, is_script
from meshwise.training.job.job import Job
from meshwise.training.job.options import AUTO, RunOptions
from meshwise.workers.gate import least_limit

SECONDS = 45.0
"""How many seconds an estimate may take. With `--nodes 2-8`, there are two estimates: for 2 nodes and for 8 nodes."""
INSTEAD = "Use more nodes, more time or another plan"
app = typer.Typer(add_completion=False)


@app.command(cls=ScriptCommand, context_settings={"obj": RunOptions, "allow_extra_args": True})
@partial(from_dataclass, without=launcher.submit.NOT_SENT)
def submit(context: typer.Context, cluster: SubmitOptions, options: RunOptions) -> None:
    """Estimate a job or a script, and send it to Slurm, Kubernetes or Ray. A run that is cut short starts again.

    What is sent is a short batch script around `meshwise run`, or a manifest;
    --dry-run prints it. Options of sbatch follow the last --. A site's
    defaults are read from site.toml: machine, network, devices, gpus,
    gpus_per_node, cpus, memory, command, runs, secrets. For Slurm: gpu_type,
    partition, account, qos, setup, container, runtime, mounts, options. For
    Kubernetes: image, claim, mount, workdir, namespace, queue, kind,
    shared_memory, gpu_resource, node_selector, tolerations, secret,
    pull_secret, service_account.

    \b
    meshwise submit train.py:job --nodes 4 --time 4h
    meshwise submit train.py:job --nodes 2-8 --dry-run -- --partition gpu
    meshwise submit --nodes 2 train.py --lr 0.1 -- --account physics
    meshwise submit --kubernetes --nodes 4 --dry-run train.py
    meshwise submit --ray http://head:8265 train.py  by ray job submit
    meshwise submit runs/20261121-140502-gpt         send a run again
    """
    own, sbatch = _parts(context, options)
    word = str(options.job or "")
    if launcher.submit.is_run(word):
        launcher.submit.refuse_options_of_runs(options)
        run = find_run(Path("runs"), word)
        if (run / MANIFEST).is_file():
            _say_sent(*launcher.pods.send_again(run, cluster, sbatch))
        else:
            _say_sent(*launcher.submit.send_again(run, cluster, sbatch))
        return
    job = launcher.submit.prepare(cluster, options, context.params, own, sbatch)
    pods = None
    if cluster.kubernetes or cluster.trainjob:
        pods, said = launcher.pods.pod_job(job, word, trainer=cluster.trainjob)
        _say(said)
        if unused := [key for key in OF_SLURM if getattr(job.site, key)]:
            _say(f"not used on Kubernetes: {', '.join(unused)} of {job.site.file}")
    refused = _verdict(options, own, job.site, nodes_of(cluster.nodes), cluster.seconds())
    if refused and not cluster.anyway:
        raise PlanError(f"the run was not submitted: {refused}. {INSTEAD}, or submit it all the same with --anyway.")
    if refused:
        _say(f"The run is sent anyway, although {refused}.")
    if told := launcher.submit.without_gpus(job):
        _say(told)
    if cluster.dry_run:
        print(manifest(pods) if pods else ray.driver_text(job) if cluster.ray else batch_script(job), end="")
    elif pods is not None:
        _say_sent(*launcher.pods.send(pods, word, own))
    elif cluster.ray:
        print(f"driver      {ray.send(job, cluster.ray)}")
    else:
        _say_sent(*launcher.submit.send(job, word, own))


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _parts(context: typer.Context, options: RunOptions) -> tuple[list[str], list[str]]:
    """Return two lists: the words for the user's script, and the words for sbatch. The words after the last `--` are
    for sbatch."""
    behind: list[str] = context.meta[BEHIND] if is_script(options.job) else ["--", *context.args]
    if "--" not in behind:
        return behind, []
    at = len(behind) - 1 - behind[::-1].index("--")
    return behind[:at], behind[at + 1 :]


def _verdict(options: RunOptions, arguments: list[str], site: Site, nodes: tuple[int, int], limit: float | None) -> str:
    """Estimate a run on the smallest and on the largest number of nodes, without running it, and show both estimates.
    Return why the run should not be submitted, or an empty string. Raises UsageError for a program that can never run.

    limit: the time limit of an attempt in seconds. None if there is none.
    """
    job: Job | str = str(options.job)
    parse_devices(options.devices or "all")
    if is_script(job):
        check_script(str(job), options)
        try:
            text = Path(str(job)).read_text(encoding="utf-8")
            compile(text, str(job), "exec")
        except (SyntaxError, ValueError) as error:
            raise UsageError(f"{job} is not a valid Python program ({error}).") from None
        if not re.search("checkpoint|Trainer", text):
            _say(f"{job} does not name mw.checkpoint: if it saves no state, a run that is cut short begins anew.")
    else:
        job = options.override(launcher.training.find_job(job, seed=options.seed, args=options.args))
    if not site.machine:
        _say(f'not rehearsed: {site.file or "site.toml"} names no machine. For one node, add to it: machine = "8xH100"')
        return ""
    found = [_of_size(job, options, arguments, site, count, limit) for count in dict.fromkeys(nodes)]
    return next(filter(None, found), "")


def _of_size(
    job: Job | str, options: RunOptions, arguments: list[str], site: Site, nodes: int, limit: float | None
) -> str:
    machine = hardware.machines.find_machine(_machine_words(site, nodes))
    devices, auto = len(machine.devices), options.plan == AUTO
    where = f"{plural(nodes, 'node')} × {devices // nodes} {site.machine.partition('x')[2] or 'devices'}"
    _say(f"{where}: rehearsing, {SECONDS:.0f} s at the most …")
    try:
        asked = PlanOptions(
            job,
            machine=machine,
            seconds=SECONDS,
            arguments=tuple(arguments),
            devices=str(devices) if auto else None,
            fits=None if auto else options.plan_on(devices),
        )
        plans = planner.plan.plan_options(asked)
    except UsageError as error:
        raise type(error)(f"{where}: {error} Fix this before you submit: --anyway skips only warnings.") from None
    except MeshwiseError as error:
        return f"on {where} the job cannot run: {error}"
    first = plans.found.estimates[0]
    _say(f"{where}: {plans_text(plans)}")
    if first.seconds is not None and limit is not None:
        if plans.steps is not None:
            attempts = math.ceil(plans.steps * first.seconds.value / limit)
            _say(f"{where}: {plural(attempts, 'attempt')} of {seconds_text(limit)} to the end.")
        if why := too_short(first.seconds.value, limit):
            return f"on {where} {why}"
    fits = first.memory.verdict in (FITS, UNKNOWN)
    return "" if fits else f"on {where} {settings_text(first.plan)} {first.memory.verdict}"


def _machine_words(site: Site, nodes: int) -> str:
    """Return the value of `--machine` for `nodes` nodes of a site, such as `2x8xH100@400Gb` for two nodes. Raises
    UsageError if there are several nodes, but the site describes its machine by a file."""
    if nodes == 1:
        return site.machine
    if site.machine.endswith(".toml"):
        raise UsageError(
            f"{site.file}: machine = '{site.machine}' is a machine file for a single node, but the run has {nodes} "
            'nodes. Describe the machine in words: machine = "8xH100" and network = "400Gb".'
        )
    return f"{nodes}x{site.machine}" + (f"@{site.network}" if site.network else "")


def too_short(step: float, limit: float) -> str:
    """Return why a time limit is too short, or an empty string if it is long enough. There must be time for one step
    and for saving checkpoints after it.

    step, limit: the seconds of a step, and the time limit in seconds.
    """
    if (needs := least_limit(step, limit)) <= limit:
        return ""
    return (
        f"a step of {seconds_text(step)} with three saves after it needs {seconds_text(needs)}, but --time is "
        f"{seconds_text(limit)}, so no attempt could finish and save a step"
    )


def _say_sent(path: Path, sent: str | kubectl.Workload | None) -> None:
    """Say what was sent, and where it is found again. path: the batch script, or the manifest."""
    run = path.parent
    where = "" if run.absolute().parent == Path("runs").absolute() else f" --in {run.parent}"
    if sent is None:
        print(f"This machine has no kubectl. The manifest is written. On one that has: kubectl apply -f {path}")
    elif isinstance(sent, str):
        print(f"sent        Slurm job {sent}\noutput      {run}/slurm-{sent}.out")
    else:
        pods = f"kubectl get pods -n {sent.namespace} -l {INSTANCE}={sent.name}"
        print(f"sent        {sent}\nmanifest    {path}\npods        {pods}")
    print(f"records     {run}\nmore with   meshwise runs{where}, meshwise logs {run.name} -f{where}")
