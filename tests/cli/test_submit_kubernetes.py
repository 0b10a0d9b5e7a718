"""`meshwise submit --kubernetes`, and what `runs`, `logs` and `stop` show of what was sent. kubectl is a stand-in here.
Of launcher/pods.py and launcher/engines/kubectl.py."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from meshwise.launcher import pods as submitted
from meshwise.launcher.engines import kubectl
from meshwise.launcher.engines.kubectl import State, Workload, state_of, workload_of
from meshwise.records import folder as names
from meshwise.records.checkpoints import Manifest, name_of, write_manifest
from tests.kubernetes import faults, jobs, read

Command = Callable[..., tuple[int, str, str]]
EXAMPLES = Path(__file__).parents[2] / "examples" / "cluster"
KUBECTL = f"""\
#!{sys.executable}
import json, pathlib, sys
import yaml
tools, words = pathlib.Path(__file__).parent, sys.argv[1:]
with (tools / "asked").open("a") as file:
    file.write(" ".join(words) + "\\n")
if (tools / "down").exists():
    sys.exit("The connection to the server localhost:8080 was refused")
kept = tools / ("pods" if words[1:2] == ["pods"] else words[0])
if words[0] == "apply" and (tools / "late").exists():
    (tools / "late").unlink()
    sys.exit("denied the request: TrainingRuntime not found")
if words[0] == "apply":
    text = sys.stdin.read()
    (tools / "applied").write_text(text)
    made = list(yaml.safe_load_all(text))
    for each in made:
        each["metadata"].setdefault("namespace", "default")
    (tools / "get").write_text(json.dumps({{"items": [made[-1]]}}))
    print(json.dumps({{"items": made}} if len(made) > 1 else made[0]))
elif words[0] == "delete":
    (tools / "get").write_text('{{"items": []}}')
else:
    print(kept.read_text(), end="")
if words[0] == "logs" and (tools / "then").exists():
    (tools / "then").replace(tools / "get")
"""
LABEL = "app.kubernetes.io/instance"


@pytest.fixture
def command(command: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Command:
    """`command("submit", …)` in a folder of a claim, which lies at tmp_path: its exit code, and what it prints."""
    here = tmp_path / "me"
    here.mkdir()
    (here / "train.py").write_text("print(1)\n")
    (here / "site.toml").write_text(
        f'image = "a/b:1"\nclaim = "team-data"\nmount = "{tmp_path}"\nnamespace = "physics"\n'
    )
    monkeypatch.chdir(here)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "no config"))
    monkeypatch.setenv("PATH", str(tmp_path / "no commands"))
    return command


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, processes: None) -> Path:
    """A folder whose files are what kubectl says, and `asked` what it was asked."""
    tools = tmp_path / "tools"
    tools.mkdir()
    (tools / "kubectl").write_text(KUBECTL)
    (tools / "kubectl").chmod(0o755)
    (tools / "api-resources").write_text("jobsets.jobset.x-k8s.io\n")
    (tools / "logs").write_text("[pod/train-0/node] step 1\n")
    says(tools, "pods", [])
    says(tools, "get", [])
    monkeypatch.setenv("PATH", str(tools))
    return tools


def says(tools: Path, what: str, items: list[Any]) -> None:
    (tools / what).write_text(json.dumps({"items": items}))


def elsewhere() -> None:
    """Pods run in another folder than this one, so they alone see the run folder."""
    site = Path("site.toml")
    site.write_text(re.sub("mount = .*", 'mount = "/shared"\nworkdir = "/work"', site.read_text()))


def pod_of(run: str, phase: str, **more: Any) -> dict[str, Any]:
    return {"metadata": {"labels": {LABEL: run}}, "status": {"phase": phase, **more}}


def sent(command: Command, *words: object) -> tuple[Path, str]:
    """Submit train.py. Return the run's folder, and the name of its object."""
    code, out, err = command("submit", "--kubernetes", *words, "train.py", "--lr", "0.1")
    assert code == 0, err
    (run,) = Path("runs").iterdir()
    return run, out.split()[2].partition("/")[2]


def test_the_example_is_what_the_command_prints(command: Command) -> None:
    words = ("--kubernetes", "--nodes", 2, "--time", "4h", "--site", EXAMPLES / "kubernetes.toml", "--dry-run")
    code, text, err = command("submit", *words, "train.py")
    assert code == 0, err
    text = re.sub(r"\d{8}-\d{6}", "20261201-120000", text)
    assert text == (EXAMPLES / "kubernetes.yaml").read_text()
    assert faults(read(text)) == []
    assert not Path("runs").exists()


@pytest.mark.parametrize(
    ("words", "key", "kinds", "says"),
    [
        ("--kubernetes --nodes 2", "", "Service Job", "no cluster answers here"),
        ("--kubernetes", 'kind = "JobSet"', "JobSet", 'site.toml has kind = "JobSet"'),
        ("--kubernetes", 'kind = "Job"', "Job", 'site.toml has kind = "Job"'),
        ("--kubernetes --trainjob", 'kind = "Job"', "TrainingRuntime TrainJob", "--trainjob"),
        ("--trainjob", "", "TrainingRuntime TrainJob", "--trainjob"),
    ],
)
def test_what_is_made_is_said(words: str, key: str, kinds: str, says: str, command: Command) -> None:
    with Path("site.toml").open("a") as file:
        file.write(key)
    code, out, err = command("submit", *words.split(), "--dry-run", "train.py")
    assert code == 0 and says in err, err
    assert [each["kind"] for each in read(out)] == kinds.split()
    assert faults(read(out)) == []


@pytest.mark.parametrize(("known", "kind"), [("jobsets.jobset.x-k8s.io\n", "JobSet"), ("", "Job")])
def test_the_cluster_is_asked_what_it_has(known: str, kind: str, command: Command, cluster: Path) -> None:
    (cluster / "api-resources").write_text(known)
    code, out, err = command("submit", "--kubernetes", "--dry-run", "train.py")
    assert code == 0 and [each["kind"] for each in read(out)] == [kind], err
    assert "this cluster has" in err
    assert not (cluster / "applied").exists() and not Path("runs").exists()


@pytest.mark.parametrize(
    ("change", "words", "says"),
    [
        ("claim = .*", "", 'claim = "team-data"'),
        ("mount = .*", "", 'mount = "/shared"'),
        ("mount = .*|mount = '/elsewhere'", "", "There are three ways"),
        ("mount = .*|mount = 'shared'", "", "mount must be an absolute path"),
        ("$|runs = '/home/me'\n", "", "not on the claim team-data"),
        ("$|kind = 'Pod'\n", "", "kind must be one of Job, JobSet, TrainJob"),
        ("$|node_selector = ['h100']\n", "", "must be a label and its value"),
        ("$|secrets = ['KEY']\n", "", "kubectl create secret generic"),
        ("$|workdir = '/work'\n", "/train.py", "by its path from there"),
        ("", "--nodes 2-8", "--nodes 8"),
        ("", "-- -p gpu", "has no options of sbatch"),
    ],
)
def test_what_cannot_be_is_said(change: str, words: str, says: str, command: Command, tmp_path: Path) -> None:
    site, (old, _, new) = Path("site.toml"), change.partition("|")
    site.write_text(re.sub(rf"{old}\Z" if old == "$" else old, new, site.read_text(), count=1))
    program = f"{tmp_path}/me{words}" if words.startswith("/") else "train.py"
    before, _, after = words.partition("-- ") if program == "train.py" else ("", "", "")
    behind = ["--", *after.split()] if after else []
    code, out, err = command("submit", "--kubernetes", "--dry-run", *before.split(), program, *behind)
    assert code == 2 and not out and says in err, err


def test_keys_of_slurm_are_said_to_be_unused(command: Command) -> None:
    with Path("site.toml").open("a") as file:
        file.write('partition = "gpu"\nsetup = ["module load cuda"]\n')
    code, _, err = command("submit", "--kubernetes", "--dry-run", "train.py")
    assert code == 0 and "not used on Kubernetes: partition, setup of site.toml" in err


def test_a_run_is_sent_shown_followed_and_stopped(command: Command, cluster: Path, tmp_path: Path) -> None:
    run, name = sent(command, "--nodes", 2)
    assert faults(read((cluster / "applied").read_text())) == []
    assert (cluster / "applied").read_text() == (run / "submit.yaml").read_text()
    record = names.read_run(run)["submission"]
    assert [*record["jobs"]] == [f"JobSet physics/{name}"]
    assert record["folder"] == str(run.absolute()) and (run / "code.json").is_file()
    assert "queued, no pods yet" in command("runs")[1]
    waits = {"reason": "Unschedulable", "message": "0/3 nodes are available: 3 Insufficient nvidia.com/gpu. more"}
    says(cluster, "pods", [pod_of(name, "Pending", conditions=[waits])])
    assert "unschedulable: 0/3 nodes are available" in " ".join(command("runs")[1].split())
    says(cluster, "pods", [pod_of(name, "Running")])
    assert json.loads(command("runs", "--json")[1])[0]["status"] == "running"
    assert "step 1" in command("logs", run.name)[1]
    code, _, err = command("submit", run)
    assert code == 2 and "still queued or running" in err
    code, out, _ = command("stop", run.name)
    assert code == 0 and out.endswith(f"{run.name}: stopped.\n")
    asked = (cluster / "asked").read_text()
    assert f"delete -f={run}/submit.yaml --ignore-not-found --cascade=foreground" in asked
    assert "--selector=app.kubernetes.io/instance=" + name in asked
    assert "stopped" in command("runs")[1]


def test_a_run_whose_folder_only_pods_see_is_known_from_kubectl(command: Command, cluster: Path) -> None:
    elsewhere()
    run, _ = sent(command)
    (job,) = [job for thing in read((cluster / "applied").read_text()) for _, job in jobs(thing)]
    (container,) = job["template"]["spec"]["containers"]
    assert container["workingDir"] == "/work" and container["args"][0] == f"--folder=/shared/runs/{run.name}"
    assert names.read_run(run)["submission"]["folder"] == f"/shared/runs/{run.name}"
    thing = json.loads((cluster / "get").read_text())["items"][0]
    thing["status"] = {"conditions": [{"type": "Completed", "status": "True"}]}
    says(cluster, "get", [thing])
    assert json.loads(command("runs", "--json")[1])[0]["status"] == "finished"
    code, out, _ = command("logs", run.name, "-f")  # it ends, as the run is over
    assert code == 0 and out == "[pod/train-0/node] step 1\n"
    code, _, err = command("logs", run.name, "--rank", 0)
    assert code == 2 and "has no logs of ranks" in err
    code, _, err = command("submit", run)
    assert code == 2 and "is finished" in err
    code, _, err = command("stop", run.name)
    assert code == 2 and "has ended already (finished)" in err


def test_a_run_that_failed_is_sent_again(command: Command, cluster: Path) -> None:
    run, name = sent(command)
    thing = json.loads((cluster / "get").read_text())["items"][0]
    thing["status"] = {"conditions": [{"type": "Failed", "status": "True", "reason": "FailedJobs"}]}
    says(cluster, "get", [thing])
    ended = {"containerStatuses": [{"state": {"terminated": {"exitCode": code}}} for code in (85, 1)]}
    says(cluster, "pods", [pod_of(name, "Failed", **ended)])
    assert "failed, exit code 1" in command("runs")[1]
    code, out, err = command("submit", run)
    assert code == 0 and f"JobSet physics/{name}" in out, err
    assert faults(read((cluster / "applied").read_text())) == []
    code, _, err = command("submit", run, "--nodes", 3)
    assert code == 2 and "--nodes: a run on Kubernetes is submitted again as it is" in err


def test_a_new_run_has_the_grace_that_an_earlier_one_measured(command: Command, cluster: Path) -> None:
    run, _ = sent(command)
    saved = run / "checkpoint" / name_of(4, 1)
    saved.mkdir(parents=True)
    write_manifest(saved, Manifest({"step": 4, "attempt": 1, "seconds": 10.0}, {}, {}, ()))
    assert submitted.grace_of([run]) == (90, "a save took 10.0 s")
    assert "terminationGracePeriodSeconds: 90" in command("submit", "--kubernetes", "--dry-run", "train.py")[1]


def test_a_train_job_is_applied_again_where_trainer_did_not_know_its_runtime_yet(
    command: Command, cluster: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kubectl, "LOOK", 0.0)
    (cluster / "late").touch()
    code, out, err = command("submit", "--trainjob", "train.py")
    assert code == 0 and "sent        TrainJob physics/train-" in out, err
    assert (cluster / "asked").read_text().count("apply") == 2


def test_what_the_cluster_refuses_leaves_no_run(command: Command, cluster: Path) -> None:
    (cluster / "down").touch()
    code, _, err = command("submit", "--kubernetes", "train.py")
    assert code == 1 and "connection to the server localhost:8080 was refused" in err
    assert not list(Path("runs").iterdir())


def test_a_cluster_that_does_not_answer_changes_no_status(command: Command, cluster: Path) -> None:
    run, _ = sent(command)
    (cluster / "down").touch()
    assert json.loads(command("runs", "--json")[1])[0]["status"] == "queued"
    code, _, err = command("logs", run.name)
    assert code == 1 and "does not answer kubectl" in err
    names.change_run(run, status="running")
    code, _, err = command("submit", run)
    assert code == 2 and "still queued or running" in err


def test_without_kubectl_the_manifest_is_written(command: Command) -> None:
    code, out, _ = command("submit", "--kubernetes", "train.py")
    (run,) = Path("runs").iterdir()
    assert (
        code == 0 and "This machine has no kubectl" in out and f"kubectl apply -f {run.absolute()}/submit.yaml" in out
    )


@pytest.mark.parametrize(
    ("conditions", "pods", "state"),
    [
        (["Complete"], [], State("finished")),
        (["Failed"], [], State("failed", "BackoffLimitExceeded")),
        (["Suspended"], [], State("queued", "suspended")),
        ([], [("Running", "")], State("running")),
        (["Suspended"], [("Running", "")], State("running")),
        ([], [("Pending", "ImagePullBackOff")], State("queued", "ImagePullBackOff")),
        ([], [("Pending", "")], State("queued", "starting")),
        ([], [("Failed", "")], State("queued", "no pods yet")),
    ],
)
def test_the_state_of_a_run_is_read(conditions: list[str], pods: list[Any], state: State) -> None:
    told = [{"type": kind, "status": "True", "reason": "BackoffLimitExceeded"} for kind in conditions]
    told += [] if conditions else [{"type": "Failed", "status": "False"}]
    waits = [{"containerStatuses": [{"state": {"waiting": {"reason": why}}}]} if why else {} for _, why in pods]
    found = [pod_of("a", phase, **more) for (phase, _), more in zip(pods, waits, strict=True)]
    assert state_of({"status": {"conditions": told}}, found) == state
    assert state_of(None, found) == State("gone", "deleted")


def test_the_output_of_a_run_is_followed_over_its_attempts(
    command: Command, cluster: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kubectl, "LOOK", 0.0)
    run, name = sent(command)
    says(cluster, "pods", [pod_of(name, "Running")])
    thing = json.loads((cluster / "get").read_text())["items"][0]
    thing["status"] = {"conditions": [{"type": "Completed", "status": "True"}]}
    says(cluster, "then", [thing])
    code, out, _ = command("logs", run.name, "-f")
    assert code == 0 and out.count("step 1") == 2
    first, second = [line for line in (cluster / "asked").read_text().splitlines() if line.startswith("logs")]
    assert "--follow" in first and "--since" not in first and "--since=" in second


def test_jobs_of_slurm_are_no_workloads() -> None:
    assert workload_of([]) is workload_of(["4711"]) is workload_of(["4711_3"]) is None
    load = Workload("TrainJob", "physics", "gpt-20261201-120000")
    assert workload_of(["4711", str(load)]) == load
