"""The objects of a run on Kubernetes, as values and as text: what every cluster takes. Of launcher/engines/manifest.py
too. The schemas and rules are those of tests/kubernetes.py; kubernetes-validate and the models of Trainer are asked
where they are installed."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import yaml

from meshwise.launcher.engines import kubernetes
from meshwise.launcher.engines.kubernetes import INSTANCE, PodJob, object_name, objects
from meshwise.launcher.engines.manifest import COMMENTS, manifest
from meshwise.launcher.engines.site import Site
from tests.kubernetes import faults, jobs, read, schema

Values = dict[str, Any]
SITE = Site(
    image="registry.example.org/me/train:1",
    claim="team-data",
    mount="/shared",
    namespace="physics",
    queue="gpus",
    cpus=64,
    memory="500Gi",
    secrets=("WANDB_API_KEY",),
    secret="train",
    node_selector=("gpu=h100",),
)
RUN = PodJob(
    name="train-20261201-120000",
    kind="JobSet",
    nodes=4,
    workdir="/shared/me",
    folder="/shared/me/runs/20261201-120000-train",
    words=["train.py", "--lr", "0.1"],
    gpus=8,
    command=["meshwise"],
    site=SITE,
    grace=120,
    why="a guess, as no save was measured",
)
KINDS = ("Job", "JobSet", "TrainJob")
VERSIONS = ("1.33", "1.35", "1.37")
ODD = [
    "a: b",
    "# no comment",
    "$(HOME)",
    "100%",
    "yes",
    "1.0",
    "'",
    '"',
    "ä",
    "restartPolicy: Always",
    "[x",
    "{",
    "-",
    "",
]


def printed(**changes: Any) -> list[Values]:
    return read(manifest(replace(RUN, **changes)))


def container_of(things: list[Values]) -> Values:
    """The container that runs, with what Trainer writes into it."""
    last = things[-1]
    if last["kind"] == "TrainJob":
        return {**jobs(things[0])[0][1]["template"]["spec"]["containers"][0], **last["spec"]["trainer"]}
    return dict(jobs(last)[0][1]["template"]["spec"]["containers"][0])


@pytest.mark.parametrize("nodes", [1, 4, 512])
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_printed_is_valid(kind: str, nodes: int) -> None:
    assert faults(printed(kind=kind, nodes=nodes)) == []
    assert faults(printed(kind=kind, nodes=nodes, gpus=0, site=Site(image="a", claim="b", mount="/c"))) == []


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_kubernetes_own_schemas_take_it(kind: str, version: str) -> None:
    validate = pytest.importorskip("kubernetes_validate").validate
    things = printed(kind=kind)
    for thing in things:
        if thing["kind"] in ("Job", "Service"):
            validate(copy.deepcopy(thing), version, strict=True)
        for name, job in jobs(thing):
            pod = job["template"]["spec"]
            if kind == "TrainJob":  # Trainer writes these into the pod
                pod["containers"][0]["image"] = "a"
            each = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": name}, "spec": job}
            validate(copy.deepcopy(each), version, strict=True)


@pytest.mark.parametrize("kind", ["JobSet", "TrainJob"])
def test_models_of_trainer_keep_every_field(kind: str) -> None:
    models = pytest.importorskip("kubeflow_trainer_api.models")
    for thing in printed(kind=kind):
        of = {"JobSet": "JobsetV1alpha2JobSet"}.get(thing["kind"], f"TrainerV1alpha1{thing['kind']}")
        kept = getattr(models, of).from_dict(copy.deepcopy(thing)).to_dict()
        assert list(dropped(thing, kept)) == []


def dropped(given: Any, kept: Any, path: str = "") -> list[str]:
    """Fields that a generated model has left out, which it does in silence."""
    if isinstance(given, dict):
        return [
            lost
            for key, value in given.items()
            for lost in (dropped(value, kept[key], f"{path}.{key}") if key in (kept or {}) else [f"{path}.{key}"])
        ]
    if isinstance(given, list):
        pairs = zip(given, kept or [], strict=False)
        return [lost for n, (a, b) in enumerate(pairs) for lost in dropped(a, b, f"{path}.{n}")]
    return []


@pytest.mark.parametrize("kind", KINDS)
def test_comments_change_nothing(kind: str) -> None:
    job = replace(RUN, kind=kind, words=ODD, folder="/shared/a: # b")
    text = manifest(job)
    plain = json.loads(json.dumps(objects(job)))
    assert read(text) == plain
    assert read(re.sub(r"(?m)^ *#.*\n", "", text)) == plain
    assert text.count("#") >= 8


def test_every_comment_is_printed_for_some_run() -> None:
    text = "".join(manifest(replace(RUN, kind=kind)) for kind in KINDS)
    assert [each for each in COMMENTS.values() if f"# {each.splitlines()[0]}" not in text] == []


def test_words_reach_the_program_as_they_were_written() -> None:
    words = container_of(printed(words=ODD))["args"][-len(ODD) :]
    assert [word.replace("$$", "$") for word in words] == ODD


@pytest.mark.parametrize(
    ("kind", "where"),
    [
        ("Job", ["4", "$(JOB_COMPLETION_INDEX)", f"{RUN.name}-0.{RUN.name}", "29500"]),
        ("JobSet", ["4", "$(JOB_COMPLETION_INDEX)", f"{RUN.name}-node-0-0.{RUN.name}", "29500"]),
    ],
)
def test_each_launcher_is_told_its_place(kind: str, where: list[str]) -> None:
    words = container_of(printed(kind=kind))["args"]
    names = ("nnodes", "node-rank", "master-addr", "master-port")
    assert words[:4] == [f"--{name}={value}" for name, value in zip(names, where, strict=True)]
    assert container_of(printed(kind=kind, nodes=1))["args"] == [f"--folder={RUN.folder}", *RUN.words]


@pytest.mark.parametrize("kind", KINDS)
def test_the_contract_of_exit_codes(kind: str) -> None:
    things = printed(kind=kind)
    job = jobs(things[0] if kind == "TrainJob" else things[-1])[0][1]
    third, first, second = job["podFailurePolicy"]["rules"]
    assert (first["action"], first["onExitCodes"]["values"]) == ("FailJob", [1, 2, 93])
    assert second["onExitCodes"]["values"] == [85]
    assert third["onPodConditions"] == [{"type": "DisruptionTarget", "status": "True"}]
    assert second["action"] == third["action"] == ("Ignore" if kind == "Job" else "FailJob")
    if kind == "Job":  # each index has its own delay, and none is waited for in vain
        assert (job["backoffLimitPerIndex"], job["maxFailedIndexes"]) == (10, 0)
        return
    whole = things[0]["spec"]
    policy = (whole["template"]["spec"] if kind == "TrainJob" else whole)["failurePolicy"]
    assert (job["backoffLimit"], policy["restartStrategy"]) == (0, "BlockingRecreate")
    said = (
        "Container node for pod physics/train-node-0-3-abcde failed with exit code {} matching FailJob rule at index 1"
    )
    for code, action in {
        1: "FailJobSet",
        2: "FailJobSet",
        93: "FailJobSet",
        85: "RestartJobSetAndIgnoreMaxRestarts",
    }.items():
        assert action_of(policy, "PodFailurePolicy", said.format(code)) == action
    lost = "Pod physics/train-node-0-1-abcde has condition DisruptionTarget matching FailJob rule at index 2"
    assert action_of(policy, "PodFailurePolicy", lost) == "RestartJobSetAndIgnoreMaxRestarts"
    assert action_of(policy, "BackoffLimitExceeded", "Job has reached the specified backoff limit") == "RestartJobSet"


def action_of(policy: Values, reason: str, message: str) -> str:
    """What the JobSet does, by the rules in its documents: the first that matches, else it starts again and counts."""
    for rule in policy["rules"]:
        patterns = rule.get("onJobFailureMessagePatterns", [""])
        if reason in rule["onJobFailureReasons"] and any(re.search(each, message) for each in patterns):
            return str(rule["action"])
    return "RestartJobSet"


@pytest.mark.parametrize("name", ["train", "Train_it.Now", "2nd", "ä", "x" * 90, "-"])
@pytest.mark.parametrize("nodes", [1, 1000])
def test_names_fit_into_names_of_pods(name: str, nodes: int) -> None:
    made = object_name(name, "20261201-120000", nodes)
    assert made.endswith("-20261201-120000")
    for kind in KINDS:
        assert faults(printed(kind=kind, name=made, nodes=nodes)) == []


def test_a_schema_allows_no_field_that_it_does_not_name() -> None:
    pod = schema("Job")["properties"]["spec"]["properties"]["template"]["properties"]["spec"]
    assert pod["additionalProperties"] is False
    assert pod["properties"]["containers"]["items"]["additionalProperties"] is False


def job_of(things: list[Values]) -> Values:
    return next(job for thing in things for _, job in jobs(thing))


def pod_of(things: list[Values]) -> Values:
    return dict(job_of(things)["template"]["spec"])


def put(inner: Callable[[list[Values]], Any], key: Any, value: Any) -> Callable[[list[Values]], None]:
    """A fault: another value at a place."""

    def plant(things: list[Values]) -> None:
        inner(things)[key] = value

    return plant


def out(inner: Callable[[list[Values]], Any], key: Any) -> Callable[[list[Values]], None]:
    """A fault: a field that is missing."""

    def plant(things: list[Values]) -> None:
        del inner(things)[key]

    return plant


def rule_of(number: int) -> Callable[[list[Values]], Any]:
    return lambda things: job_of(things)["podFailurePolicy"]["rules"][number]


def first(things: list[Values]) -> Values:
    return dict(pod_of(things)["containers"][0])


PLANTED: dict[str, tuple[str, Callable[[list[Values]], None], str]] = {
    "a typo in a Job": ("Job", put(job_of, "backofLimit", 3), "'backofLimit' was unexpected"),
    "a number as text": ("Job", put(job_of, "completions", "4"), "not of type 'integer'"),
    "a typo in a pod": (
        "JobSet",
        put(lambda t: job_of(t)["template"]["spec"], "restartpolicy", "Never"),
        "restartpolicy",
    ),
    "a typo in a volume": ("Job", put(lambda t: pod_of(t)["volumes"][0]["emptyDir"], "sizelimit", "1Gi"), "sizelimit"),
    "a size that is none": (
        "Job",
        put(lambda t: pod_of(t)["volumes"][0]["emptyDir"], "sizeLimit", "8GB"),
        "does not match",
    ),
    "a typo in a failure policy": (
        "JobSet",
        put(lambda t: t[0]["spec"]["failurePolicy"], "maxRestart", 3),
        "maxRestart",
    ),
    "an action that is none": (
        "JobSet",
        put(lambda t: t[0]["spec"]["failurePolicy"]["rules"][0], "action", "Fail"),
        "'Fail' is not one of",
    ),
    "another version": ("JobSet", put(lambda t: t[0], "apiVersion", "jobset.x-k8s.io/v1"), "apiVersion of a JobSet is"),
    "a typo in a TrainJob": (
        "TrainJob",
        put(lambda t: t[1]["spec"]["trainer"], "numNode", 2),
        "'numNode' was unexpected",
    ),
    "no runtime": ("TrainJob", out(lambda t: t[1]["spec"], "runtimeRef"), "'runtimeRef' is a required property"),
    "another runtime": (
        "TrainJob",
        put(lambda t: t[1]["spec"]["runtimeRef"], "name", "torch"),
        "there is no TrainingRuntime",
    ),
    "Trainer's own variable": (
        "TrainJob",
        put(lambda t: t[1]["spec"]["trainer"], "env", [{"name": "PET_NNODES", "value": "2"}]),
        "Trainer's own",
    ),
    "no step of Trainer": (
        "TrainJob",
        out(lambda t: t[0]["spec"]["template"]["spec"]["replicatedJobs"][0]["template"], "metadata"),
        "so Trainer changes none",
    ),
    "another container for Trainer": (
        "TrainJob",
        put(
            lambda t: t[0]["spec"]["template"]["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"][
                "containers"
            ][0],
            "name",
            "main",
        ),
        "a container of the name node",
    ),
    "restarts in the pod": (
        "Job",
        put(lambda t: job_of(t)["template"]["spec"], "restartPolicy", "OnFailure"),
        "needs restartPolicy Never",
    ),
    "pods that are replaced early": (
        "JobSet",
        put(job_of, "podReplacementPolicy", "TerminatingOrFailed"),
        "can only be Failed",
    ),
    "no index": ("Job", put(job_of, "completionMode", "NonIndexed"), "pods have no index"),
    "fewer pods than launchers": ("Job", put(job_of, "parallelism", 2), "completions and parallelism differ"),
    "codes without order": (
        "Job",
        put(lambda t: rule_of(1)(t)["onExitCodes"], "values", [93, 1, 2]),
        "in order, each once",
    ),
    "exit code 0": ("Job", put(lambda t: rule_of(1)(t)["onExitCodes"], "values", [0, 85]), "0 cannot be among"),
    "codes of another container": (
        "JobSet",
        put(lambda t: rule_of(1)(t)["onExitCodes"], "containerName", "main"),
        "which the pod has not",
    ),
    "an index that fails": ("JobSet", put(rule_of(1), "action", "FailIndex"), "FailIndex needs backoffLimitPerIndex"),
    "a reason that is none": (
        "JobSet",
        put(lambda t: t[0]["spec"]["failurePolicy"]["rules"][0], "onJobFailureReasons", ["ExitCode"]),
        "no Job fails by ExitCode",
    ),
    "a long name": ("JobSet", put(lambda t: t[0]["metadata"], "name", "x" * 60), "names of pods have at most 63"),
    "a digit first": ("Job", put(lambda t: t[0]["metadata"], "name", "2-train"), "is no name"),
    "a label with a space": ("Job", put(lambda t: t[0]["metadata"]["labels"], INSTANCE, "a b"), "no value of a label"),
    "a Service with an address": ("Job", out(lambda t: t[0]["spec"], "clusterIP"), "headless"),
    "a Service that waits": (
        "Job",
        out(lambda t: t[0]["spec"], "publishNotReadyAddresses"),
        "publishNotReadyAddresses",
    ),
    "a Service of other pods": ("Job", put(lambda t: t[0]["spec"], "selector", {INSTANCE: "other"}), "selects none"),
    "no Service": ("Job", out(lambda t: t, 0), "machine 0 has no name"),
    "a volume that is not there": (
        "Job",
        put(lambda t: pod_of(t)["volumes"][1], "name", "data"),
        "there is no volume claim",
    ),
    "no shared memory": ("Job", lambda t: pod_of(t)["containers"][0]["volumeMounts"].pop(0), "/dev/shm has 64 MB"),
    "a shell": ("Job", put(lambda t: pod_of(t)["containers"][0], "command", ["sh", "-c"]), "keeps SIGTERM"),
    "a variable that is not there": (
        "Job",
        put(lambda t: first(t)["args"], 1, "--node-rank=$(RANK)"),
        "no such variable",
    ),
    "half a GPU": ("Job", put(lambda t: first(t)["resources"]["limits"], "nvidia.com/gpu", "0.5"), "a whole number"),
    "GPUs without a limit": (
        "Job",
        put(lambda t: first(t)["resources"]["requests"], "amd.com/gpu", 1),
        "needs a limit",
    ),
    "a toleration of all effects": (
        "Job",
        put(lambda t: pod_of(t)["tolerations"][0], "effect", "NoSchedule"),
        "needs effect",
    ),
    "the time of a kill": (
        "Job",
        put(lambda t: job_of(t)["template"]["spec"], "terminationGracePeriodSeconds", 30),
        "too few",
    ),
    "two namespaces": ("Job", put(lambda t: t[1]["metadata"], "namespace", "other"), "several namespaces"),
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_fault_is_found(name: str) -> None:
    kind, plant, said = PLANTED[name]
    things = printed(kind=kind)
    plant(things)
    found = faults(things)
    assert [fault for fault in found if said in fault], found


def test_without_pyyaml_the_command_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "yaml", None)
    with pytest.raises(Exception, match=r"pip install 'meshwise\[kubernetes\]'"):
        manifest(RUN)


def test_a_train_job_keeps_to_itself_what_trainer_writes() -> None:
    runtime, job = printed(kind="TrainJob")
    assert {"image", "command", "args", "resources"} & {*pod_of([runtime])["containers"][0]} == set()
    assert job["spec"]["trainer"]["numNodes"] == runtime["spec"]["mlPolicy"]["numNodes"] == 4
    assert yaml.safe_dump(runtime).count("PET_") == 0
    assert job["spec"]["trainer"]["args"] == [f"--folder={RUN.folder}", *RUN.words]  # Trainer's variables say the place
    assert job["kind"] == kubernetes.TRAIN_JOB
