"""A stand-in for the controllers of Kubernetes, JobSet and Trainer, that runs the pods of a manifest on this machine.

    with cluster(read(text), tmp_path) as one:
        one.until("step 5/")
        one.pods[1].kill()
        assert one.ended() == "Complete"

Each pod is process 1 in namespaces of its own, with its own address, names and /dev/shm; a new pod has another address.
Its files are this machine's, so the claim lies at the same path. **No controller is run**: this follows the rules that
are documented for them, and no more:
- Indexed Job: a pod for each index without one that runs or succeeded, only once the index's last pod is Failed or
  Succeeded (podReplacementPolicy Failed), 10 s, 20 s, 40 s … after its last failure (backoffLimitPerIndex: by the
  failures of the index, also those that are ignored). The first rule of podFailurePolicy that matches decides: FailJob
  ends the Job and deletes its pods (TERM, grace); Ignore is not counted. An index with more counted failures than the
  limit fails, and with maxFailedIndexes 0 the Job with it.
- JobSet: a Job that failed has its pods deleted first (TERM, grace), and only then the condition Failed, with reason
  and message of the rule. failurePolicy's first rule that matches decides, else RestartJobSet, which counts. All Jobs
  are deleted in the foreground; new ones when all pods are gone.
- A pod on a silent machine: a condition DisruptionTarget after the toleration, but Failed only when its machine is back
  or removed.
- Names resolve from the start of a pod, ready or not, and change their address with a new pod.
"""

from __future__ import annotations

import contextlib
import re
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from tests.hosts import Host, hosts
from tests.kubernetes import jobs
from tests.pods import amount, expanded, trainer, variables_of

MOST = 24  # pods of one trial
BACKOFF, LONGEST = 10.0, 600.0
LIMIT = 400.0  # seconds of one trial, on a busy machine
ALONE = """
echo "$0" >/proc/sys/kernel/hostname
mount --bind "$1" /etc/hosts
mount -t tmpfs -o "size=$2" tmpfs /dev/shm
cd "$3"; shift 3
exec unshare --pid --fork --kill-child --mount-proc -- env -i "$@"
"""
Values = dict[str, Any]


@dataclass
class Pod:
    """A pod that was started. deleted: when it got TERM."""

    index: int
    host: Host
    grace: float
    output: Path
    process: subprocess.Popen[Any]
    disrupted: bool = False
    killed: bool = False
    deleted: float | None = None
    ended: float | None = None

    @property
    def shown(self) -> str:
        return self.output.read_text()

    @property
    def code(self) -> int:
        return 137 if self.killed else int(self.process.returncode)  # unshare says 1 of a child that was killed

    def look(self) -> bool:
        """Whether it has ended, and its address with it. Kill it after its grace period."""
        if self.ended is None and self.deleted and time.monotonic() > self.deleted + self.grace:
            self.kill()
        if self.ended is None and self.process.poll() is not None:
            self.ended = time.monotonic()
            switch, number = self.host.namespace.rsplit("-host", 1)
            subprocess.run(["ip", "-n", f"{switch}-switch", "link", "set", f"host{number}", "down"], check=True)
        return self.ended is not None

    def delete(self) -> None:
        if self.deleted is None and not self.look():
            self.deleted = time.monotonic()
            self._send(signal.SIGTERM, self._processes()[:1])

    def kill(self) -> None:
        self.killed = True
        self._send(signal.SIGKILL, self._processes()[:1])

    def freeze(self) -> None:
        """Its machine stands still."""
        self._send(signal.SIGSTOP, self._processes())

    def _processes(self) -> list[psutil.Process]:
        while not (found := psutil.Process(self.process.pid).children(recursive=True)):
            time.sleep(0.01)
        return list[psutil.Process](found)

    def _send(self, number: int, found: list[psutil.Process]) -> None:
        for each in found:
            with contextlib.suppress(psutil.NoSuchProcess):
                each.send_signal(number)


@dataclass
class Job:
    """A Job, as its controller sees it. failed: the reason and the message of its end, once that is certain."""

    name: str
    spec: Values
    start: Callable[[int], Pod]
    pods: dict[int, Pod] = field(default_factory=dict)
    failures: Counter[int] = field(default_factory=Counter)
    counted: Counter[int] = field(default_factory=Counter)
    judged: set[int] = field(default_factory=set)
    failed: tuple[str, str] | None = None

    def look(self) -> str:
        """What a controller does now. Return `Complete`, `Failed`, or nothing."""
        over = {index: pod for index, pod in self.pods.items() if pod.look()}
        for index in over.keys() - self.judged:
            self.judged.add(index)
            if over[index].code and not self.failed:
                self._judge(over[index])
        if self.failed:
            for pod in self.pods.values():
                pod.delete()
            return "Failed" if len(over) == len(self.pods) else ""
        wanted = range(self.spec["completions"])
        if all(index in over and over[index].code == 0 for index in wanted):
            return "Complete"
        for index in wanted:
            if index not in self.pods or (index in over and over[index].code and self._is_due(over[index])):
                self.pods[index] = self.start(index)
                self.judged.discard(index)
        return ""

    def _is_due(self, pod: Pod) -> bool:
        wait = min(BACKOFF * 2 ** (self.failures[pod.index] - 1), LONGEST)
        return bool(time.monotonic() > (pod.ended or 0.0) + wait)

    def _judge(self, pod: Pod) -> None:
        self.failures[pod.index] += 1
        for number, rule in enumerate(self.spec["podFailurePolicy"]["rules"]):
            codes = rule.get("onExitCodes")
            if pod.code in codes["values"] if codes else pod.disrupted:
                if rule["action"] == "FailJob":
                    what = "Pod has condition DisruptionTarget"
                    if codes:
                        named = f"Container {codes['containerName']} for pod default/{self.name}-{pod.index}"
                        what = f"{named} failed with exit code {pod.code}"
                    self.failed = "PodFailurePolicy", f"{what} matching FailJob rule at index {number}"
                return
        self.counted[pod.index] += 1
        if self.counted.total() > self.spec.get("backoffLimit", self.counted.total()):
            self.failed = "BackoffLimitExceeded", "Job has reached the specified backoff limit"
        if self.counted[pod.index] > self.spec.get("backoffLimitPerIndex", self.counted[pod.index]):
            assert self.spec["maxFailedIndexes"] == 0
            self.failed = "MaxFailedIndexesExceeded", "Job has exceeded the specified maximal number of failed indexes"


class Cluster:
    """The one Job of a manifest, which a JobSet begins anew when it failed. old: the Jobs before."""

    def __init__(self, things: list[Values], cluster: list[Host], folder: Path, variables: Mapping[str, str]) -> None:
        self.name, self.things, self.folder = things[-1]["metadata"]["name"], things, folder
        (self.spec,) = [job for thing in things for _, job in jobs(thing)]
        self.policy = _set_of(things)
        self.variables, self._hosts, self.every = variables, iter(cluster), list[Pod]()
        self.names = folder / "hosts"
        self.names.write_text("127.0.0.1 localhost\n")
        self.old, self.restarts, self.job = list[Job](), 0, self._job()
        self._last = time.monotonic() + LIMIT

    @property
    def pods(self) -> dict[int, Pod]:
        return self.job.pods

    @property
    def shown(self) -> str:
        return "".join(f"--- {pod.output.stem} ended with {pod.process.poll()}\n{pod.shown}" for pod in self.every)

    def look(self) -> str:
        """What the controllers do now. Return how the run has ended, or nothing."""
        state = self.job.look()
        if state != "Failed" or self.policy is None:
            return state
        assert self.job.failed is not None
        action = _action(self.policy, *self.job.failed)
        self.restarts += action == "RestartJobSet"
        if action == "FailJobSet" or self.restarts > self.policy["maxRestarts"]:
            return state
        self.old, self.job = [*self.old, self.job], self._job()
        return ""

    def until(self, text: str, count: int = 1) -> None:
        """Let it go on until a text was printed so many times."""
        self._go_on(lambda: self.shown.count(text) >= count)

    def ended(self) -> str:
        """Let it go on until the run has ended. Return `Complete` or `Failed`."""
        while not (state := self.look()):
            self._wait()
        return state

    def alone(self, index: int) -> Pod:
        """A pod that is begun again after the others have ended with 0. Wait for its end."""
        pod = self._start(index)
        while not pod.look():
            self._wait()
        return pod

    def went_on(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        self._go_on(lambda: time.monotonic() > end)

    def _go_on(self, there: Callable[[], bool]) -> None:
        while not there():
            assert not self.look(), self.shown
            self._wait()

    def _wait(self) -> None:
        assert time.monotonic() < self._last, self.shown
        time.sleep(0.05)

    def _job(self) -> Job:
        return Job(self.name if self.policy is None else f"{self.name}-node-0", self.spec, self._start)

    def _start(self, index: int) -> Pod:
        host, spec, written = next(self._hosts), self.spec["template"]["spec"], trainer(self.things)
        name = f"{self.job.name}-{index}"
        domain = f"{name}.{spec['subdomain'] if self.policy is None else self.name}"
        known = [line for line in self.names.read_text().splitlines() if not line.endswith(f" {name}")]
        self.names.write_text("\n".join([*known, f"{host.address} {domain} {name}", ""]))  # the same file, as mounted
        container = spec["containers"][0] | {key: value for key, value in written.items() if key != "env"}
        env = {**self.variables, **variables_of(container), "JOB_COMPLETION_INDEX": str(index)}
        env |= {"KUBERNETES_SERVICE_HOST": "10.96.0.1"}
        if written:
            master = f"{self.name}-node-0-0.{self.name}"
            env |= {"PET_NNODES": str(self.spec["completions"]), "PET_NODE_RANK": str(index)}
            env |= {"PET_MASTER_ADDR": master, "PET_MASTER_PORT": "29500", "PET_NPROC_PER_NODE": "auto"}
        words = [expanded(word, env) for word in (*container["command"], *container.get("args", ()))]
        memory = next(each["emptyDir"]["sizeLimit"] for each in spec["volumes"] if "emptyDir" in each)
        setup = [name, str(self.names), str(amount(memory)), container["workingDir"]]
        output = self.folder / f"{len(self.every)}-pod{index}.txt"
        with output.open("w") as file:
            command = ["sh", "-ec", ALONE, *setup, *[f"{key}={value}" for key, value in env.items()], *words]
            process = host.popen(command, stdout=file, stderr=file, stdin=subprocess.DEVNULL)
        self.every.append(Pod(index, host, spec["terminationGracePeriodSeconds"], output, process))
        return self.every[-1]


def _set_of(things: list[Values]) -> Values | None:
    """The failurePolicy of a JobSet. None for a Job."""
    specs = {each["kind"]: each["spec"] for each in things}
    found = specs.get("JobSet") or specs.get("TrainingRuntime", {}).get("template", {}).get("spec")
    return dict(found["failurePolicy"]) if found else None


def _action(policy: Values, reason: str, message: str) -> str:
    for rule in policy["rules"]:
        patterns = rule.get("onJobFailureMessagePatterns", [""])
        if reason in rule["onJobFailureReasons"] and any(re.search(each, message) for each in patterns):
            return str(rule["action"])
    return "RestartJobSet"


@contextlib.contextmanager
def cluster(things: list[Values], folder: Path, variables: Mapping[str, str] | None = None) -> Iterator[Cluster]:
    """A cluster to which a manifest was applied. folder: for what the pods print."""
    with hosts(MOST, None) as found:
        yield Cluster(things, found, folder, variables or {})
