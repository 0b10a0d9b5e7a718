"""Send a run to Kubernetes, once or again."""

from __future__ import annotations

import contextlib
import math
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path, PurePosixPath

from meshwise.launcher.code_files import write_code
from meshwise.launcher.engines import kubectl
from meshwise.launcher.engines.batch_script import BatchJob, nodes_of
from meshwise.launcher.engines.kubernetes import JOB, JOB_SET, TRAIN_JOB, PodJob, object_name
from meshwise.launcher.engines.manifest import manifest
from meshwise.launcher.engines.site import Site
from meshwise.launcher.submit import SubmitOptions, new_run, note_sent
from meshwise.records import checkpoints
from meshwise.records import folder as names
from meshwise.records.files import write_text
from meshwise.records.run_list import MANIFEST, jobs_of
from meshwise.spec.errors import CheckpointError, UsageError
from meshwise.spec.options import given_options, option_name
from meshwise.spec.units import plural, seconds_text

RUNS = Path("runs")
SAVES, UNKNOWN, STEP = 3, 20.0, 60.0
"""How many saves to leave time for after SIGTERM, as workers/gate.py does; the seconds of a save that was not measured;
the seconds for the step and all the rest."""
NEEDED = {"image": '"registry.example.org/me/train:1"', "claim": '"team-data"', "mount": '"/shared"'}
Sent = tuple[Path, kubectl.Workload | None]


def pod_job(job: BatchJob, word: str, *, trainer: bool) -> tuple[PodJob, str]:
    """Check what is to run on Kubernetes. Return it, and a text that says which kind of object was chosen, and why.

    job: the same run, as Slurm would get it.
    word: the program.
    trainer: whether the user asked for a TrainJob.
    """
    site, (low, high) = job.site, nodes_of(job.nodes)
    if low != high:
        raise UsageError(f"--nodes {job.nodes}: a Job starts all its pods or none. Use one number: --nodes {high}")
    if job.options:
        raise UsageError(
            f"{job.options[0]} after --: Kubernetes has no options of sbatch. Change the manifest instead: --dry-run > "
            "job.yaml, then kubectl apply -f job.yaml"
        )
    _refuse_incomplete(site)
    workdir, folder = _places(job, word)
    kind, why = _kind(site, trainer=trainer)
    grace, known = grace_of(sorted(job.run.parent.glob(f"*-{job.name}")))
    limit = [] if job.seconds is None else [f"--time-limit={math.ceil(job.seconds)}s"]
    pods = PodJob(
        name=object_name(job.name, job.run.name[:15], low),
        kind=kind,
        nodes=low,
        workdir=workdir,
        folder=folder,
        words=[*limit, *(word.removeprefix(f"{job.workdir}/") for word in job.words)],
        gpus=0 if site.gpus == "none" else job.gpus,
        command=job.command if site.command else ["meshwise"],
        site=site,
        grace=grace,
        why=known,
    )
    return pods, f"{kind} of {plural(low, 'pod')} with {plural(pods.gpus, 'GPU')} each: {why}"


def send(pods: PodJob, word: str, arguments: Sequence[str]) -> Sent:
    """Make the run's folder here, and apply its manifest. Return the path of the manifest, and the workload (None
    without kubectl).

    Where pods run in another folder than this one, the run folder is seen by them alone, and `runs` gets a folder with
    the manifest and the record of what was sent.
    """
    seen, run = Path(pods.workdir) == Path.cwd(), Path(pods.folder)
    run = run if seen else RUNS.absolute() / run.name
    with new_run(run, word, arguments, folder=pods.folder, site=pods.site.file):
        write_text(run / MANIFEST, manifest(pods))
        if seen:
            write_code(run, word)
        return run / MANIFEST, _applied(run)


def send_again(run: Path, cluster: SubmitOptions, sbatch: Sequence[str]) -> Sent:
    """Apply a run's manifest again. Returns what `send` returns."""
    given = [option_name(name, option) for name, _, option in given_options(replace(cluster, kubernetes=False))]
    if given := [*given, *sbatch]:
        raise UsageError(
            f"{given[0]}: a run on Kubernetes is submitted again as it is. Edit {run / MANIFEST}, or submit a new run."
        )
    facts = names.read_run(run)
    load = kubectl.workload_of(jobs_of(facts))
    state = kubectl.states([load]).get(load) if load else None
    if facts.get("status") == names.RUNNING if state is None else not state.is_over:
        raise UsageError(f"{run} is still queued or running. Stop it first: meshwise stop {run.name}")
    if "finished" in (facts.get("status"), state and state.status):
        raise UsageError(f"{run} is finished, so nothing is left to do. Submit a new run.")
    (run / names.STOP).unlink(missing_ok=True)
    if facts["submission"]["folder"] == str(run.absolute()):
        write_code(run, facts["submission"]["job"])
    if load is not None:  # what has ended is still there, and would be left as it is
        kubectl.delete(load, run / MANIFEST, kubectl.PATIENCE)
    if shutil.which("kubectl") is not None:
        names.change_run(run, status=names.QUEUED)  # before its pods begin
    return run / MANIFEST, _applied(run)


def grace_of(runs: Sequence[Path]) -> tuple[int, str]:
    """Return how many seconds a run needs from SIGTERM to its end, and where the number comes from: the saves of the
    newest of `runs` that has any."""
    save = next((each for each in map(_measured, reversed(runs)) if each is not None), None)
    seconds = math.ceil(STEP + SAVES * (UNKNOWN if save is None else save))
    return seconds, "a guess, as no save was measured" if save is None else f"a save took {seconds_text(save)}"


def _measured(run: Path) -> float | None:
    """Return the seconds of the longest of a run's newest saves."""
    found = []
    for saved in checkpoints.checkpoints_in(run / names.CHECKPOINTS)[-3:]:
        with contextlib.suppress(CheckpointError, KeyError):
            found.append(float(checkpoints.read_manifest(saved).facts["seconds"]))
    return max(found, default=None)


def _applied(run: Path) -> kubectl.Workload | None:
    """Apply a run's manifest. Return the workload (None without kubectl)."""
    if shutil.which("kubectl") is None:
        return None
    load = kubectl.apply((run / MANIFEST).read_text(encoding="utf-8"))
    note_sent(run, str(load))
    return load


def _kind(site: Site, *, trainer: bool) -> tuple[str, str]:
    """Return the kind of object to make, and why."""
    if trainer or site.kind:
        return (TRAIN_JOB, "--trainjob") if trainer else (site.kind, f'{site.file} has kind = "{site.kind}"')
    known = kubectl.has_job_sets()
    if known is not None:
        return (JOB_SET, "this cluster has JobSets") if known else (JOB, "this cluster has no JobSets")
    return JOB, f'no cluster answers here. For one that has JobSets, add to site.toml: kind = "{JOB_SET}"'


def _refuse_incomplete(site: Site) -> None:
    file = site.file or "site.toml"
    if missing := [key for key in NEEDED if not getattr(site, key)]:
        raise UsageError(
            f"{file} must say which image pods have, and which claim holds the run folder. Add, for example, "
            f"{', '.join(f'{key} = {NEEDED[key]}' for key in missing)}. kubectl get pvc lists claims; mount is the "
            "path at which pods see the claim."
        )
    if site.secrets and not site.secret:
        raise UsageError(
            f"{file}: pods read {', '.join(site.secrets)} from a Secret of the cluster. Make one, kubectl create "
            'secret generic train --from-env-file FILE, and add: secret = "train"'
        )


def _places(job: BatchJob, word: str) -> tuple[str, str]:
    """Return the folder in which pods run the command, and the run folder, as pods see them. Raises UsageError if they
    cannot see one of them."""
    site, mount = job.site, PurePosixPath(job.site.mount)
    name, seen = Path(word.rpartition(":")[0] or word), job.workdir.is_relative_to(mount)
    if name.suffix == ".py" and not (site.workdir or (job.workdir / name).is_relative_to(mount)):
        raise UsageError(
            f"{name} lies in {job.workdir}, but pods see only the claim {site.claim}, at {mount}. There are three "
            f"ways. Mount the claim at {mount} here too, and submit from a folder in it. Or copy the program onto it "
            f'(kubectl cp), and say in site.toml where: workdir = "{mount}/me/train". Or build an image that contains '
            'the program, and say where: workdir = "/work".'
        )
    if site.workdir and name.is_absolute():
        raise UsageError(f"{name}: pods run in {site.workdir}. Name the program by its path from there.")
    workdir = site.workdir or (str(job.workdir) if seen else site.mount)
    parent = PurePosixPath(job.run.parent)
    if workdir != str(job.workdir) and job.run.parent == RUNS.absolute():
        parent = mount / RUNS
    if not parent.is_relative_to(mount):
        raise UsageError(
            f"the run folder would lie in {parent}, which is not on the claim {site.claim}, at {mount}. Add to "
            f'site.toml: runs = "{mount}/runs"'
        )
    return workdir, str(parent / job.run.name)
