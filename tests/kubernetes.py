"""What a cluster would say against the objects of a run, without a cluster.

`faults` reads them by the schemas in tests/launcher/engines/schemas, in which an unknown field is a fault, and then by
RULES: what only the server, the webhooks of JobSet and Trainer, or the pods' fate would show. The rules are read in the
documents and sources of Kubernetes 1.37, JobSet 0.12 and Trainer 2.3, and were not seen on a cluster.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import yaml

SCHEMAS = Path(__file__).parent / "launcher" / "engines" / "schemas"
LABEL = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
VALUE = re.compile(r"([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?")
REASONS = {
    *("BackoffLimitExceeded", "DeadlineExceeded", "FailedIndexes", "MaxFailedIndexesExceeded"),
    "PodFailurePolicy",
}
SHELLS = {"sh", "bash", "/bin/sh", "/bin/bash", "env"}
ORDINARY = {"cpu", "memory", "ephemeral-storage"}
OF_CONTROLLERS = {"JOB_COMPLETION_INDEX"}
OF_TRAINER = {f"PET_{name}" for name in ("NNODES", "NODE_RANK", "NPROC_PER_NODE", "MASTER_ADDR", "MASTER_PORT")}
RESERVED = OF_TRAINER
Values = dict[str, Any]


def read(text: str) -> list[Values]:
    """The objects of a manifest."""
    return list(yaml.safe_load_all(text))


def faults(things: list[Values]) -> list[str]:
    """Everything that is wrong with the objects of a run."""
    return [fault for thing in things for fault in unknown(thing)] or [*refused(things)]


def unknown(thing: Values) -> Iterator[str]:
    """What is no field of an object, or has another type."""
    kind = thing.get("kind", "")
    if kind not in VERSIONS:
        yield f"{kind} is no kind that a run has"
        return
    if thing.get("apiVersion") != VERSIONS[kind]:
        yield f"apiVersion of a {kind} is {VERSIONS[kind]}, not {thing.get('apiVersion')}"
    for error in jsonschema.Draft202012Validator(schema(kind)).iter_errors(thing):
        yield f"{'.'.join(map(str, error.path))}: {error.message[:120]}"


VERSIONS = {
    "Service": "v1",
    "Job": "batch/v1",
    "JobSet": "jobset.x-k8s.io/v1alpha2",
    "TrainingRuntime": "trainer.kubeflow.org/v1alpha1",
    "TrainJob": "trainer.kubeflow.org/v1alpha1",
}


@functools.cache
def schema(kind: str) -> Values:
    """The schema of a kind, which allows no field that it does not name."""
    whole = {"apiVersion": {"type": "string"}, "kind": {"type": "string"}}
    names = {"type": "object", "additionalProperties": {"type": "string"}}
    meta = {"name": {"type": "string"}, "namespace": {"type": "string"}, "labels": names, "annotations": names}
    spec = _spec(kind)
    needed = ["apiVersion", "kind", "metadata", "spec"]
    found = {"type": "object", "required": needed, "properties": {**whole, "metadata": {}, "spec": spec}}
    found["properties"]["metadata"] = {"type": "object", "required": ["name"], "properties": meta}
    return _strict(found)


def _spec(kind: str) -> Values:
    if kind == "Service":
        words = {"clusterIP": {"type": "string"}, "publishNotReadyAddresses": {"type": "boolean"}}
        words["selector"] = {"type": "object", "additionalProperties": {"type": "string"}}
        return {"type": "object", "properties": words}
    if kind == "Job":
        each = _spec("JobSet")["properties"]["replicatedJobs"]["items"]["properties"]["template"]
        return dict(each["properties"]["spec"])
    read = json.loads((SCHEMAS / f"{kind.lower()}.json").read_text())["properties"]["spec"]
    if kind == "TrainingRuntime":
        read["properties"]["template"]["properties"]["spec"] = _spec("JobSet")
    return dict(read)


def _strict(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_strict(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    found = {key: _strict(value) for key, value in schema.items()}
    if isinstance(found.get("properties"), dict) and found.get("type", "object") == "object":
        found.setdefault("additionalProperties", False)
    return found


def jobs(thing: Values) -> list[tuple[str, Values]]:
    """The specs of the Jobs of an object, each with the name that its pods' names begin with."""
    name, spec = thing["metadata"]["name"], thing["spec"]
    if thing["kind"] == "Job":
        return [(name, spec)]
    if thing["kind"] == "TrainingRuntime":
        spec = spec["template"]["spec"]
    every = spec.get("replicatedJobs", [])
    return [(f"{name}-{each['name']}-{each.get('replicas', 1) - 1}", each["template"]["spec"]) for each in every]


def refused(things: list[Values]) -> Iterator[str]:
    """What the server refuses, or leaves waiting or lost, although every field is one."""
    services = {each["metadata"]["name"]: each for each in things if each["kind"] == "Service"}
    runtimes = {each["metadata"]["name"]: each for each in things if each["kind"] == "TrainingRuntime"}
    if len({each["metadata"].get("namespace") for each in things}) > 1:
        yield "the objects lie in several namespaces"
    for thing in things:
        yield from _names(thing)
        for name, job in jobs(thing):
            yield from _job(name, job, alone=thing["kind"] == "Job")
            pod = job["template"]["spec"]
            trainer = thing["kind"] == "TrainingRuntime"
            yield from _pod(pod, trainer=trainer)
            if thing["kind"] == "Job" and job.get("completions", 1) > 1:
                yield from _reachable(pod, job, services)
        if thing["kind"] == "JobSet":
            yield from _failure_policy(thing["spec"])
        if thing["kind"] == "TrainingRuntime":
            yield from _failure_policy(thing["spec"]["template"]["spec"])
            yield from _runtime(thing)
        if thing["kind"] == "TrainJob":
            yield from _train_job(thing, runtimes)


def _names(thing: Values) -> Iterator[str]:
    name = thing["metadata"]["name"]
    if len(name) > 63 or not LABEL.fullmatch(name):
        yield f"{name} is no name: at most 63 of a-z, 0-9 and -, a letter first"
    for key, value in thing["metadata"].get("labels", {}).items():
        if not VALUE.fullmatch(value):
            yield f"label {key}: {value} is no value of a label"
    for name, job in jobs(thing):
        longest = f"{name}-{job.get('completions', 1) - 1}-abcde"
        if len(longest) > 63:
            yield f"{longest} is too long: names of pods have at most 63 characters"


def _job(name: str, job: Values, *, alone: bool) -> Iterator[str]:
    pod, indexed = job["template"]["spec"], job.get("completionMode") == "Indexed"
    if not indexed and (alone or "completionMode" in job):  # a JobSet's default is Indexed
        yield f"{name}: without completionMode Indexed pods have no index"
    if indexed and job.get("completions") is None:
        yield f"{name}: completionMode Indexed needs completions"
    if job.get("completions") != job.get("parallelism"):
        yield f"{name}: completions and parallelism differ: launchers would wait for pods that do not come"
    if "backoffLimitPerIndex" in job and not indexed:
        yield f"{name}: backoffLimitPerIndex needs completionMode Indexed"
    if "maxFailedIndexes" in job and "backoffLimitPerIndex" not in job:
        yield f"{name}: maxFailedIndexes needs backoffLimitPerIndex"
    if job.get("ttlSecondsAfterFinished", 1) < 0 or job.get("backoffLimit", 1) < 0:
        yield f"{name}: must not be negative"
    if "podFailurePolicy" not in job:
        yield f"{name}: without podFailurePolicy an exit code of 2 is tried again"
        return
    if pod.get("restartPolicy") != "Never":
        yield f"{name}: podFailurePolicy needs restartPolicy Never"
    if job.get("podReplacementPolicy", "Failed") != "Failed":
        yield f"{name}: with podFailurePolicy, podReplacementPolicy can only be Failed"
    containers = {each["name"] for each in pod["containers"]}
    for rule in job["podFailurePolicy"]["rules"]:
        codes = rule.get("onExitCodes")
        if ("onPodConditions" in rule) == (codes is not None):
            yield f"{name}: a rule has either onExitCodes or onPodConditions"
        if rule["action"] == "FailIndex" and "backoffLimitPerIndex" not in job:
            yield f"{name}: FailIndex needs backoffLimitPerIndex"
        if codes and codes.get("containerName", next(iter(containers))) not in containers:
            yield f"{name}: onExitCodes names container {codes['containerName']}, which the pod has not"
        if codes and codes["values"] != sorted(set(codes["values"])):
            yield f"{name}: exit codes must be in order, each once"
        if codes and codes["operator"] == "In" and 0 in codes["values"]:
            yield f"{name}: 0 cannot be among the values of In"


def _pod(pod: Values, *, trainer: bool) -> Iterator[str]:
    volumes = {each["name"]: each for each in pod.get("volumes", ())}
    for toleration in pod.get("tolerations", ()):
        if "tolerationSeconds" in toleration and toleration.get("effect") != "NoExecute":
            yield "tolerationSeconds needs effect NoExecute"
    for container in pod["containers"]:
        paths = [each["mountPath"] for each in container.get("volumeMounts", ())]
        if len(paths) != len(set(paths)):
            yield f"two volumes at one mountPath: {paths}"
        for mount in container.get("volumeMounts", ()):
            if mount["name"] not in volumes:
                yield f"volumeMounts: there is no volume {mount['name']}"
            if ":" in mount["mountPath"] or not mount["mountPath"].startswith("/"):
                yield f"{mount['mountPath']} is no mountPath"
        if "/dev/shm" not in paths:
            yield "/dev/shm has 64 MB"
        yield from _resources(container.get("resources", {}))
        if trainer:
            continue
        if not container.get("image") or not container.get("command"):
            yield "the container has no image, or no command"
        yield from _command(container, {each["name"] for each in container.get("env", ())} | OF_CONTROLLERS)
    if pod.get("terminationGracePeriodSeconds", 30) <= 30:
        yield "30 s after SIGTERM are too few for a save"


def _command(container: Values, known: set[str]) -> Iterator[str]:
    words = [*container.get("command", ()), *container.get("args", ())]
    if words and words[0] in SHELLS:
        yield f"process 1 is {words[0]}, which keeps SIGTERM to itself"
    for name in re.findall(r"(?<!\$)(?:\$\$)*\$\((\w+)\)", " ".join(words)):
        if name not in known:
            yield f"$({name}) stays as it is: the container has no such variable"
    names = [each["name"] for each in container.get("env", ())]
    if len(names) != len(set(names)):
        yield "a variable of env stands there twice"


def _resources(resources: Values) -> Iterator[str]:
    requests, limits = resources.get("requests", {}), resources.get("limits", {})
    for name in {*requests, *limits} - ORDINARY:
        if "/" not in name:
            yield f"{name} is no resource"
        elif name not in limits:
            yield f"{name} needs a limit"
        elif requests.get(name, limits[name]) != limits[name]:
            yield f"{name}: request and limit must be equal"
        elif not str(limits[name]).isdigit():
            yield f"{name} must be a whole number"


def _reachable(pod: Values, job: Values, services: dict[str, Values]) -> Iterator[str]:
    service = services.get(pod.get("subdomain", ""))
    if service is None:
        yield "subdomain names no Service, so machine 0 has no name"
        return
    labels = job["template"].get("metadata", {}).get("labels", {})
    if not service["spec"].get("selector", {}).items() <= labels.items():
        yield "the Service selects none of the pods"
    if service["spec"].get("clusterIP") != "None":
        yield "pods have names only by a headless Service: clusterIP None"
    if not service["spec"].get("publishNotReadyAddresses"):
        yield "publishNotReadyAddresses: launchers would wait for pods that wait for them"


def _failure_policy(spec: Values) -> Iterator[str]:
    rules = spec.get("failurePolicy", {}).get("rules", ())
    names = [each["name"] for each in rules]
    if len(names) != len(set(names)):
        yield "two rules of failurePolicy have one name"
    for rule in rules:
        if not re.fullmatch(r"[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?", rule["name"]):
            yield f"failurePolicy: {rule['name']} is no name of a rule"
        if unknown := {*rule.get("onJobFailureReasons", ())} - REASONS:
            yield f"failurePolicy: no Job fails by {', '.join(unknown)}"
    if not spec.get("network", {}).get("publishNotReadyAddresses", True):
        yield "publishNotReadyAddresses: launchers would wait for pods that wait for them"


def _runtime(thing: Values) -> Iterator[str]:
    label = "trainer.kubeflow.org/trainjob-ancestor-step"
    steps = []
    for each in thing["spec"]["template"]["spec"]["replicatedJobs"]:
        step = each["template"].get("metadata", {}).get("labels", {}).get(label)
        steps.append(step)
        if step == "trainer" and each.get("replicas", 1) != 1:
            yield "the trainer's replicas must be 1"
        if step == "trainer" and "node" not in [
            c["name"] for c in each["template"]["spec"]["template"]["spec"]["containers"]
        ]:
            yield "the trainer must have a container of the name node"
    if "trainer" not in steps:
        yield f"no job has the label {label}: trainer, so Trainer changes none"


def _train_job(thing: Values, runtimes: dict[str, Values]) -> Iterator[str]:
    spec = thing["spec"]
    trainer, ref = spec.get("trainer", {}), spec["runtimeRef"]
    if ref.get("kind") == "TrainingRuntime" and ref["name"] not in runtimes:
        yield f"runtimeRef: there is no TrainingRuntime {ref['name']}"
    for each in trainer.get("env", ()):
        if each["name"] in RESERVED:
            yield f"{each['name']} is Trainer's own: refused in env"
    yield from _command(trainer, OF_TRAINER | {each["name"] for each in trainer.get("env", ())})
    yield from _resources(trainer.get("resourcesPerNode", {}))
    if not trainer.get("image") or not trainer.get("command"):
        yield "the trainer has no image, or no command"
