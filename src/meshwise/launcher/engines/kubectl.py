"""Call kubectl: apply, ask, show what pods print, delete."""

from __future__ import annotations

import json
import math
import re
import subprocess
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshwise.launcher.engines import slurm
from meshwise.spec.errors import MeshwiseError
from meshwise.spec.exit_codes import AGAIN

PATIENCE, SHORT = 30.0, 10.0  # seconds to wait for an answer of the cluster
LOOK = 2.0  # seconds between two looks at the pods
KINDS = {
    "Job": "jobs.batch",
    "JobSet": "jobsets.jobset.x-k8s.io",
    "TrainJob": "trainjobs.trainer.kubeflow.org",
}
OWN = "app.kubernetes.io/managed-by=meshwise"
INSTANCE = "app.kubernetes.io/instance"
QUEUED, RUNNING, FINISHED, FAILED, GONE = "queued", "running", "finished", "failed", "gone"
ENDS = {"Complete": FINISHED, "Completed": FINISHED, "Failed": FAILED}
_TEXT = re.compile(rf"({'|'.join(KINDS)}) ([a-z0-9-]+)/([a-z0-9-]+)")


@dataclass(frozen=True)
class Workload:
    """The object of a run on a cluster. Its text, such as `JobSet physics/gpt-20261121-140502`, stands in the run's
    record."""

    kind: str
    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.kind} {self.namespace}/{self.name}"


@dataclass(frozen=True)
class State:
    """What a cluster says of a run.

    status: queued, running, finished, failed, or gone for an object that was
        deleted.
    why: what it waits for, or how it failed.
    """

    status: str
    why: str = ""

    @property
    def is_over(self) -> bool:
        """Whether the run does not start again by itself."""
        return self.status in (FINISHED, FAILED, GONE)


def workload_of(jobs: Sequence[str]) -> Workload | None:
    """Return the workload that the last of a run's jobs names. Return None for a job of another engine."""
    found = _TEXT.fullmatch(jobs[-1]) if jobs else None
    return Workload(*found.groups()) if found else None


def has_job_sets() -> bool | None:
    """Return whether the cluster knows JobSets, or None without an answer."""
    words = ["kubectl", "api-resources", "--api-group=jobset.x-k8s.io", "-o=name"]
    try:
        return "jobsets" in slurm.asked(words, patience=SHORT)
    except MeshwiseError:
        return None


def apply(text: str) -> Workload:
    """Apply a manifest, and return its workload. Raises SchedulerError with kubectl's message."""
    words = ["kubectl", "apply", "-o=json", "-f=-"]
    try:
        told = json.loads(slurm.asked(words, text=text))
    except slurm.SchedulerError as error:
        if "TrainingRuntime" not in str(error):
            raise
        time.sleep(LOOK)  # Trainer may not know yet the runtime that was made a moment before
        told = json.loads(slurm.asked(words, text=text))
    found = next(each for each in told.get("items", [told]) if each["kind"] in KINDS)
    return Workload(found["kind"], found["metadata"]["namespace"], found["metadata"]["name"])


def delete(load: Workload, manifest: Path, wait: float) -> bool:
    """Delete all objects of a manifest, so that their pods save and end. Return whether all pods have ended within
    `wait` seconds."""
    words = ["kubectl", "delete", f"-f={manifest}", "--ignore-not-found", "--cascade=foreground"]
    try:
        slurm.asked([*words, f"--timeout={math.ceil(wait)}s", *_space(load.namespace)], patience=wait + PATIENCE)
    except slurm.SchedulerError as error:
        if "timed out" not in str(error):
            raise
        return False
    return True


def states(loads: Iterable[Workload]) -> dict[Workload, State]:
    """Return what the cluster says of these workloads. Those of a cluster that does not answer are left out."""
    wanted, found = set(loads), dict[Workload, State]()
    for kind, space in {(load.kind, load.namespace) for load in wanted}:
        things, pods = _items(KINDS[kind], space), _items("pods", space)
        known = {each["metadata"]["name"]: each for each in things or ()}
        for load in wanted if things is not None and pods is not None else ():
            if (load.kind, load.namespace) == (kind, space):
                own = [pod for pod in pods or () if pod["metadata"]["labels"].get(INSTANCE) == load.name]
                found[load] = state_of(known.get(load.name), own)
    return found


def state_of(thing: Any, pods: Sequence[Any]) -> State:
    """Return the state of a run.

    thing: its object, as kubectl prints it in JSON. None if there is none.
    pods: its pods.
    """
    if thing is None:
        return State(GONE, "deleted")
    conditions = thing.get("status", {}).get("conditions", ())
    true = {each["type"]: each for each in conditions if each["status"] == "True"}
    for kind in true.keys() & ENDS.keys():
        return State(ENDS[kind], _failure(true[kind], pods) if kind == "Failed" else "")
    phases = {pod["status"].get("phase") for pod in pods}
    if "Running" in phases:
        return State(RUNNING)
    if "Suspended" in true:
        return State(QUEUED, "suspended")
    why = filter(None, map(_waiting, pods))
    return State(QUEUED, next(why, "starting" if "Pending" in phases else "no pods yet"))


def output(load: Workload, *, follow: bool = False) -> Iterator[str]:
    """Yield the lines that a run's pods print. `follow`: until the run is over, over all attempts."""
    words = ["logs", f"--selector={INSTANCE}={load.name}", "--prefix", "--max-log-requests=1000", "--tail=-1"]
    words += ["--ignore-errors", *(["--follow"] if follow else []), *_space(load.namespace)]
    since, said = list[str](), ""
    while True:
        known = states([load]).get(load)  # asked before the lines are read
        if known is None:
            raise slurm.SchedulerError("the cluster does not answer kubectl. Check it: kubectl cluster-info")
        if known.why != said:
            said = known.why
            yield f"{load}: {known.status}, {said}"
        with subprocess.Popen(
            ["kubectl", *words, *since],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            errors="replace",
        ) as told:
            yield from (line.rstrip("\n") for line in told.stdout or ())
        if known.is_over or not follow:
            return
        ended = time.monotonic()
        time.sleep(LOOK)
        since = [f"--since={math.ceil(time.monotonic() - ended)}s"]  # pods of earlier attempts stay


def _failure(condition: Any, pods: Sequence[Any]) -> str:
    """Return how a run failed: the exit code that ended it, if known."""
    ended = [each["state"].get("terminated", {}) for pod in pods for each in pod["status"].get("containerStatuses", ())]
    codes = {int(each.get("exitCode", 0)) for each in ended} - {0, AGAIN}
    return f"exit code {min(codes)}" if codes else str(condition.get("reason", ""))


def _waiting(pod: Any) -> str:
    """Return what a pod waits for, such as `ImagePullBackOff`."""
    for each in pod["status"].get("containerStatuses", ()):
        if reason := each["state"].get("waiting", {}).get("reason"):
            return str(reason)
    for each in pod["status"].get("conditions", ()):
        if each.get("reason") == "Unschedulable":
            return f"unschedulable: {each.get('message', '').partition('. ')[0]}"
    return ""


def _items(what: str, namespace: str) -> list[Any] | None:
    """Return our own objects of a kind, or None without an answer."""
    words = ["kubectl", "get", what, f"--selector={OWN}", "-o=json", *_space(namespace)]
    try:
        return list(json.loads(slurm.asked(words, patience=SHORT))["items"])
    except MeshwiseError:
        return None


def _space(namespace: str) -> list[str]:
    return [f"--namespace={namespace}"] if namespace else []
