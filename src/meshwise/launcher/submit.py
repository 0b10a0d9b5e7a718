"""Send a run to a cluster's queue, once or again."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from meshwise.hardware.words import machine_from_words
from meshwise.launcher.code_files import write_code
from meshwise.launcher.engines import slurm
from meshwise.launcher.engines.batch_script import BatchJob, batch_script, nodes_of, slurm_time
from meshwise.launcher.engines.site import Site, find_site
from meshwise.records import folder as names
from meshwise.records.files import write_text
from meshwise.records.run_list import SCRIPT, array_of, jobs_of, tasks_of
from meshwise.spec.durations import seconds_of
from meshwise.spec.errors import MeshwiseError, UsageError
from meshwise.spec.options import Option, given_options, option_name
from meshwise.training.job.options import RunOptions

NOT_SENT = ("nnodes", "node_rank", "master_addr", "master_port", "rdzv_endpoint", "resume", "folder", "time_limit")
"""Options of `meshwise run` that `meshwise submit` lacks, because the cluster or the batch script decides them."""
DECIDED = ("--nodes", "-N", "--time", "-t", "--ntasks", "-n", "--ntasks-per-node", "--output", "-o")
"""Options of sbatch that the user may not give, because the batch script decides them."""


@dataclass(frozen=True)
class SubmitOptions:
    """The options of `meshwise submit` for the cluster."""

    nodes: Annotated[str, Option("number of nodes: 4, or 2-8 as the queue allows", metavar="N|N-M")] = "1"
    time: Annotated[str | None, Option("time limit of an attempt: 4h, 30min; default: the partition's")] = None
    machine: Annotated[str | None, Option("one node, for the estimate: 8xH100; default: the site's")] = None
    site: Annotated[
        str | None,
        Option(
            "defaults of the cluster; default: site.toml here, next to the job, or in your configuration folder",
            metavar="FILE",
        ),
    ] = None
    ray: Annotated[str | None, Option("send it to Ray, not to Slurm: http://head:8265", metavar="ADDRESS")] = None
    dry_run: Annotated[bool, Option("print the script, and send nothing", name="--dry-run")] = False
    kubernetes: Annotated[bool, Option("send it to Kubernetes: a JobSet, or a Job where there are none")] = False
    trainjob: Annotated[bool, Option("send it to Kubernetes as a TrainJob of Kubeflow Trainer")] = False
    anyway: Annotated[bool, Option("send it even if the estimate advises against it", name="--anyway")] = False

    def __post_init__(self) -> None:
        nodes_of(self.nodes)
        self.seconds()

    def seconds(self) -> float | None:
        """Return the time limit of an attempt in seconds, or None for the limit of the partition."""
        # For sbatch, a bare number means minutes. For other options of meshwise, it means seconds.
        if self.time is not None and self.time.strip().isdigit():
            raise UsageError(f"--time {self.time} has no unit. Write {self.time}min or {self.time}s.")
        return None if self.time is None else seconds_of(self.time, "--time")


def prepare(
    options: SubmitOptions,
    run: RunOptions,
    typed: Mapping[str, Any],
    arguments: Sequence[str],
    sbatch: Sequence[str],
) -> BatchJob:
    """Check the options of a new run. Return the job from which its batch script is written."""
    if run.job is None:
        raise UsageError(
            "meshwise submit needs a job such as train.py:job, or the folder of a run that was submitted before."
        )
    _refuse_decided(sbatch)
    if nodes_of(options.nodes)[1] > 1:
        run.refuse_restarts("on several nodes")
    word = str(run.job)
    file = Path(word if word.endswith(".py") else word.rpartition(":")[0])
    site = find_site(options.site, beside=file.parent)
    site = site if options.machine is None else replace(site, machine=options.machine)
    out = Path(run.out if str(run.out) != "runs" else site.runs or run.out).absolute()
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", word.replace(".py", "")).strip("-") or "run"
    devices = [] if run.devices or not site.devices else ["--devices", site.devices]
    return BatchJob(
        name=name,
        workdir=Path.cwd(),
        run=out / f"{time.strftime('%Y%m%d-%H%M%S')}-{name}",
        words=[*devices, *_words(run, str(typed.get("plan"))), word, *arguments],
        nodes=options.nodes,
        seconds=options.seconds(),
        gpus=_gpus(site, run.devices or site.devices),
        command=_command(site),
        site=site,
        options=sbatch,
    )


def send(job: BatchJob, word: str, arguments: Sequence[str]) -> tuple[Path, str]:
    """Make the run folder, and submit the batch script. Return its path and the job number."""
    _refuse_missing(job.site.secrets, job.site.file)
    with new_run(job.run, word, arguments, site=job.site.file, secrets=list(job.site.secrets)):
        write_text(job.run / SCRIPT, batch_script(job))
        write_code(job.run, word)
        return job.run / SCRIPT, _sent(job.run)


@contextlib.contextmanager
def new_run(run: Path, word: str, arguments: Sequence[str], **submission: Any) -> Iterator[None]:
    """Make the folder and the record of a run that the `with` block sends. If it cannot be sent, remove them.

    word: the program.
    submission: further facts about what is sent.
    """
    try:
        run.mkdir(parents=True)
    except OSError as error:
        raise UsageError(f"{run} cannot be created ({error.strerror}). Use another folder with --out.") from None
    sent = {"job": word, "jobs": {}, "sent": time.time(), **submission}
    given = {"arguments": list(arguments)} if arguments else {}
    try:
        names.write_run(run, {"job": word, "status": names.QUEUED, "submission": sent, **given})
        yield
    except MeshwiseError:
        shutil.rmtree(run)
        raise


def note_sent(run: Path, job: str) -> None:
    """Record that a cluster has taken a job of a run."""
    sent, record = time.time(), names.read_run(run).get("submission", {})
    jobs = {**record.get("jobs", {}), job: sent}
    names.change_run(run, submission={**record, "jobs": jobs, "sent": sent})


def send_again(run: Path, options: SubmitOptions, sbatch: Sequence[str]) -> tuple[Path, str]:
    """Submit a run's batch script again, with the current program. Returns what `send` returns."""
    facts, (sent, task) = names.read_run(run), array_of(run)
    if not (sent / SCRIPT).is_file():
        raise UsageError(f"{run} was not started by meshwise submit. Use meshwise run --resume {run}")
    if facts.get("status") == names.RUNNING or slurm.newest(jobs_of(facts)):
        raise UsageError(f"{run} is still in the queue or running. Stop it first: meshwise stop {run.name}")
    words, record = _again_words(options, sbatch, task), names.read_run(sent).get("submission", {})
    if facts.get("status") == "finished":
        raise UsageError(
            f"{run} is finished, so nothing is left to do. Submit a new run: meshwise submit {record.get('job')}. Or "
            f"train this run longer: meshwise run --resume {run} --epochs N"
        )
    _refuse_missing(record.get("secrets", ()), record.get("site", ""))
    write_code(sent, str(record.get("job", "")))
    for each in (run, *(() if task else tasks_of(run))):
        (each / names.STOP).unlink(missing_ok=True)
    names.change_run(run, status=names.QUEUED)  # before the job is sent, which may begin at once
    try:
        return sent / SCRIPT, _sent(run, words)
    except MeshwiseError:
        names.change_run(run, status=facts.get("status"))
        raise


def _again_words(options: SubmitOptions, sbatch: Sequence[str], task: str = "") -> list[str]:
    """Return the options of sbatch for a run that is submitted again."""
    low, high = nodes_of(options.nodes)
    if low != high or options.site or options.machine or options.dry_run:
        raise UsageError(
            "meshwise submit RUN submits the batch script of that run again, and takes only --nodes N, --time and, "
            "after --, options of sbatch. To change the range of nodes or the site, edit submit.sh in the run's folder."
        )
    nodes = [f"--nodes={low}"] if options.nodes != "1" else []
    _refuse_decided(sbatch)
    seconds = options.seconds()
    limit = [] if seconds is None else [f"--time={slurm_time(seconds)}"]
    return [*nodes, *limit, *([f"--array={task}"] if task else []), *sbatch]


def _refuse_decided(sbatch: Sequence[str]) -> None:
    if sbatch and not sbatch[0].startswith("-"):
        raise UsageError(f"'{sbatch[0]}': only options of sbatch may follow the last --, such as -- --partition gpu.")
    for word in sbatch:
        if (word.partition("=")[0] if word.startswith("--") else word[:2]) in DECIDED:
            raise UsageError(
                f"{word} after --: the batch script sets this option. Use --nodes and --time before the --."
            )


def _refuse_missing(secrets: Sequence[str], file: str) -> None:
    """Raise UsageError if an environment variable that the job needs is not set."""
    if missing := [name for name in secrets if not os.environ.get(name)]:
        raise UsageError(
            f"{file} lists {', '.join(missing)} as secrets, but these are not set. Set each before you submit."
        )


def refuse_options_of_runs(run: RunOptions) -> None:
    """Raise UsageError if options of `meshwise run` are given when a run is submitted again."""
    if given := _words(run, ""):
        raise UsageError(f"{given[0]}: a run that is submitted again keeps its own options. Leave this option out.")


def _sent(run: Path, words: Sequence[str] = ()) -> str:
    folder, task = array_of(run)
    job = slurm.send(folder / SCRIPT, [f"--output={folder.absolute()}/slurm-%j.out", *words])
    job += f"_{task}" if task else ""
    note_sent(run, job)
    return job


def is_run(word: str) -> bool:
    """Return whether a word is the name of a run in `runs`, or a run's folder."""
    return bool(word) and any((folder / names.RUN).is_file() for folder in (Path("runs", word), Path(word)))


def _words(run: RunOptions, plan: str) -> list[str]:
    """Return the options of a run as words of a command line. plan: the file of its plan, or `auto`."""
    words: list[str] = []
    for name, value, option in given_options(run):
        if option.argument or name == "out":
            continue
        if name == "plan":
            value = Path(plan).absolute() if Path(plan).is_file() else plan
        for each in value if isinstance(value, tuple) else [value]:
            words += [option_name(name, option)] if each is True else [option_name(name, option), str(each)]
    return words


def _gpus(site: Site, devices: str | None) -> int:
    """Return how many GPUs to ask for on each node."""
    if devices and "cpu" in devices:
        return 0
    if devices and (found := re.fullmatch(r"(\d+)x\w+", devices)):
        return int(found[1])
    if not (site.gpus_per_node or site.machine) and (site.gpu_type or site.gpus == "gres"):
        raise UsageError(f'{site.file} must say how many GPUs a node has. Add gpus_per_node = 8 or machine = "8xH100".')
    if site.gpus_per_node or not site.machine or site.machine.endswith(".toml"):
        return site.gpus_per_node
    machine = machine_from_words(site.machine)
    return 0 if machine.devices[0].name.startswith("cpu") else len(machine.devices)


def without_gpus(job: BatchJob) -> str:
    """Return a sentence if a job asks for no GPU, although nothing says that it needs none. Else an empty string."""
    site, words = job.site, " ".join(["--devices", job.site.devices, *job.words])
    asked = job.gpus or re.search(r"--g(res|pus)|--tres|-G", " ".join([*site.options, *job.options]))
    meant = site.gpus == "none" or "cpu" in site.machine or re.search(r"--devices \S*cpu", words)
    if asked or meant:
        return ""
    return (
        "The job asks for no GPU, for which most sites give it one CPU worker on each node. For GPUs, add --devices "
        f"8xcuda, or gpus_per_node = 8 to {site.file or 'site.toml'}. If CPUs are meant, say so with --devices 4xcpu."
    )


def _command(site: Site) -> list[str]:
    """Return the command that calls meshwise on the nodes: the site's command, or this Python with `-m meshwise`."""
    if site.command:
        return shlex.split(site.command)
    if site.container or site.setup:
        return ["meshwise"]
    return [sys.executable, "-m", "meshwise"]
