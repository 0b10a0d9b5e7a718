"""Describe a run as a Job, JobSet or TrainJob of Kubernetes.

The launchers notice a pod that is lost, and all of them end with 85. What
follows is the cluster's, as its documents say:
- Of a Job, each index gets a new pod, after 10 s, 20 s, 40 s and so on. A new
  pod may meet launchers that have not ended yet; both then end with 85.
- Of a JobSet, and a TrainJob that is one, the first pod that fails has all
  pods deleted. The new ones come when the last of the old ones is gone.

Both wait for a pod whose machine is silent until the machine comes back, or
is removed from the cluster.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from meshwise.launcher.engines.site import Site
from meshwise.spec.exit_codes import AGAIN, FAILED, NO_PROGRESS, USAGE

JOB, JOB_SET, TRAIN_JOB = "Job", "JobSet", "TrainJob"
TRAINER = "trainer.kubeflow.org"
NEVER_AGAIN = (FAILED, USAGE, NO_PROGRESS)
NODE = "node"  # the container, and the JobSet's only kind of pod; Trainer's word
PORT = 29500  # of the launchers' meeting, on machine 0
TRIES = 10  # of pods that were killed, for instance without memory
GONE = 30  # seconds after which pods of a silent machine are given up
INSTANCE = "app.kubernetes.io/instance"
OWN = {"app.kubernetes.io/managed-by": "meshwise"}
Values = dict[str, Any]


class Lines(list[str]):
    """Words that are written one a line."""


@dataclass(frozen=True)
class PodJob:
    """A run on pods, one for each machine. `meshwise run` is process 1.

    folder: the run folder, as pods see it.
    workdir: the folder in which pods run the command.
    grace: the seconds from SIGTERM to SIGKILL.
    why: where the number `grace` comes from.
    """

    name: str
    kind: str
    nodes: int
    workdir: str
    folder: str
    words: Sequence[str]
    gpus: int
    command: Sequence[str]
    site: Site
    grace: int
    why: str


def object_name(name: str, stamp: str, nodes: int) -> str:
    """Return a name that all objects of a run can have, with `stamp` at its
    end. Host names of pods, which are longer, have at most 63 characters."""
    word = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    word = word if word[:1].isalpha() else f"run-{word}"
    most = 63 - len(f"-{stamp}-{NODE}-0-{nodes - 1}-abcde")
    return f"{word[:most].strip('-')}-{stamp}"


def objects(job: PodJob) -> list[Values]:
    """Return a run's objects, in the order in which they are applied."""
    if job.kind == TRAIN_JOB:
        return [_training_runtime(job), _train_job(job)]
    if job.kind == JOB_SET:
        return [_object(job, JOB_SET, "jobset.x-k8s.io/v1alpha2", _set_spec(job))]
    limits = {"backoffLimitPerIndex": TRIES, "maxFailedIndexes": 0}
    found = _object(job, JOB, "batch/v1", _job_spec(job) | limits)
    return [_service(job), found] if job.nodes > 1 else [found]


def _object(job: PodJob, kind: str, version: str, spec: Values) -> Values:
    labels = {**OWN, INSTANCE: job.name}
    if job.site.queue and kind == job.kind:
        labels["kueue.x-k8s.io/queue-name"] = job.site.queue
    space = {"namespace": job.site.namespace} if job.site.namespace else {}
    meta = {"name": job.name, **space, "labels": labels}
    return {"apiVersion": version, "kind": kind, "metadata": meta, "spec": spec}


def _service(job: PodJob) -> Values:
    spec = {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": {INSTANCE: job.name}}
    return _object(job, "Service", "v1", spec)


def _job_spec(job: PodJob) -> Values:
    """Return what a Job and the Job of a JobSet have in common."""
    again = "Ignore" if job.kind == JOB else "FailJob"
    codes = {"containerName": NODE, "operator": "In"}
    drained = [{"type": "DisruptionTarget", "status": "True"}]
    rules = [  # the first that fits counts: what a program says on a machine that is drained may come of that
        {"action": again, "onPodConditions": drained},
        {"action": "FailJob", "onExitCodes": {**codes, "values": [*NEVER_AGAIN]}},
        {"action": again, "onExitCodes": {**codes, "values": [AGAIN]}},
    ]
    return {
        "completionMode": "Indexed",
        "completions": job.nodes,
        "parallelism": job.nodes,
        "podReplacementPolicy": "Failed",
        "podFailurePolicy": {"rules": rules},
        "template": {"metadata": {"labels": {**OWN, INSTANCE: job.name}}, "spec": _pod(job)},
    }


def _set_spec(job: PodJob) -> Values:
    """Return what a JobSet and the JobSet of a TrainJob have in common."""
    failed = {"onJobFailureReasons": ["PodFailurePolicy"]}
    said = {"onJobFailureMessagePatterns": [f"exit code ({'|'.join(map(str, NEVER_AGAIN))}) "]}
    rules = [
        {"name": "neverAgain", "action": "FailJobSet", **failed, **said},
        {"name": "startAgain", "action": "RestartJobSetAndIgnoreMaxRestarts", **failed},
    ]
    template: Values = {"spec": {**_job_spec(job), "backoffLimit": 0}}
    if job.kind == TRAIN_JOB:
        label = {f"{TRAINER}/trainjob-ancestor-step": "trainer"}
        template = {"metadata": {"labels": label}, **template}
    again = {"maxRestarts": TRIES, "restartStrategy": "BlockingRecreate"}
    return {
        "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
        "failurePolicy": {**again, "rules": rules},
        "replicatedJobs": [{"name": NODE, "replicas": 1, "template": template}],
    }


def _training_runtime(job: PodJob) -> Values:
    """Return the runtime of a TrainJob: what only a runtime can say."""
    spec = _set_spec(job)
    pod = spec["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    for key in ("image", "command", "args", "resources"):
        pod["containers"][0].pop(key, None)
    policy = {"numNodes": job.nodes, "torch": {}}
    runtime = {"mlPolicy": policy, "template": {"spec": spec}}
    return _object(job, "TrainingRuntime", f"{TRAINER}/v1alpha1", runtime)


def _train_job(job: PodJob) -> Values:
    container = _container(job)
    own = {key: container[key] for key in ("image", "command", "args")}
    if "resources" in container:
        own["resourcesPerNode"] = container["resources"]
    runtime = {"apiGroup": TRAINER, "kind": "TrainingRuntime", "name": job.name}
    spec = {"runtimeRef": runtime, "trainer": {"numNodes": job.nodes, **own}}
    return _object(job, TRAIN_JOB, f"{TRAINER}/v1alpha1", spec)


def _pod(job: PodJob) -> Values:
    site = job.site
    spec: Values = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": job.grace,
        "enableServiceLinks": False,
    }
    if job.kind == JOB and job.nodes > 1:  # a JobSet sets its own
        spec["subdomain"] = job.name
    if site.node_selector:
        spec["nodeSelector"] = dict(each.split("=", 1) for each in site.node_selector)
    if site.pull_secret:
        spec["imagePullSecrets"] = [{"name": site.pull_secret}]
    if site.service_account:
        spec["serviceAccountName"] = site.service_account
    taints = [{"key": key, "operator": "Exists"} for key in site.tolerations]
    ends = {"operator": "Exists", "effect": "NoExecute", "tolerationSeconds": GONE}
    silent = [{"key": f"node.kubernetes.io/{state}", **ends} for state in ("unreachable", "not-ready")]
    memory = {"medium": "Memory", "sizeLimit": site.shared_memory}
    volumes = [
        {"name": "shared-memory", "emptyDir": memory},
        {"name": "claim", "persistentVolumeClaim": {"claimName": site.claim}},
    ]
    return spec | {"tolerations": [*taints, *silent], "containers": [_container(job)], "volumes": volumes}


def _container(job: PodJob) -> Values:
    site = job.site
    words = [f"--folder={job.folder}", *job.words]
    escaped = [word.replace("$", "$$") for word in words]  # of $(VARIABLE)
    memory: Values = {"memory": site.memory} if site.memory else {}
    named = {
        "requests": ({"cpu": str(site.cpus)} if site.cpus else {}) | memory,
        "limits": memory | ({site.gpu_resource: job.gpus} if job.gpus else {}),
    }
    secret = {"name": site.secret}
    env = [{"name": name, "valueFrom": {"secretKeyRef": secret | {"key": name}}} for name in site.secrets]
    more = {"env": env, "resources": {k: v for k, v in named.items() if v}}
    return {
        "name": NODE,
        "image": site.image,
        "workingDir": job.workdir,
        "command": [*job.command, "run"],
        "args": Lines([*_place(job), *escaped]),
        **{key: value for key, value in more.items() if value},
        "volumeMounts": [
            {"name": "shared-memory", "mountPath": "/dev/shm"},
            {"name": "claim", "mountPath": site.mount},
        ],
    }


def _place(job: PodJob) -> list[str]:
    """Return the options that say which of the machines a pod is. For a TrainJob, Trainer's variables say it."""
    if job.nodes == 1 or job.kind == TRAIN_JOB:
        return []
    first = f"{job.name}-0" if job.kind == JOB else f"{job.name}-{NODE}-0-0"
    given: Values = {
        "nnodes": job.nodes,
        "node-rank": "$(JOB_COMPLETION_INDEX)",
        "master-addr": f"{first}.{job.name}",
        "master-port": PORT,
    }
    return [f"--{key}={value}" for key, value in given.items()]
