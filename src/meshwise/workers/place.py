"""Find the place of this process among its launcher's processes.

The place is read from environment variables. Launchers are tried from the innermost outwards; the first launcher whose
variables are set is taken.

A batch script of Slurm has SLURM_PROCID and SLURM_NTASKS too, although it is one process. Only a step has the variables
SLURM_STEP_*, but a batch script that was submitted from inside a step inherits that step's variables. A process's step
is known from its control group; without one, the step's variables are trusted if they agree with those that Slurm sets
again for every task and batch script.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from meshwise.records.lock import Work
from meshwise.spec.errors import UsageError
from meshwise.spec.units import plural
from meshwise.workers.control_groups import read_text

LOCAL_HOSTS = ("localhost", "127.0.0.1", "::1")
OPEN = "OMPI_COMM_WORLD_"
JOB = "SLURM_JOB_ID"
STEPS = "SLURM_STEP_NUM_TASKS"
OF_STEPS = ("SLURM_STEP_TASKS_PER_NODE", "SLURM_STEP_NODELIST", "SLURM_NODEID", "SLURM_LOCALID")
_NAME = re.compile(r"(?:[^,\[\]\s]|\[[^\[\]]*\])+")
_RANGE = re.compile(r"(\d+)(?:-(\d+))?")


@dataclass(frozen=True)
class Place:
    """The position of one process among the `size` processes that a launcher, such as srun or torchrun, has started
    together. A process without a launcher is alone: its rank is 0, and `size` is 1.

    launcher: the name of the launcher, such as `Slurm` or `torchrun`. It is empty if there is no launcher.
    node, nodes: the index of the process's machine, and the number of machines.
    job: the id of the launcher's job. It is empty if there is no job.
    attempt: how often the launcher has started the job, counted from 1. It is 0 if unknown.
    hosts: the names of the machines, in the order of `node`. It is empty if they are unknown. There are more than
        `nodes` names if some machines of the job run no process.
    rendezvous: the host and the port of rank 0, if the launcher sets them.
    key: a text that is equal on all processes that were started together, and on no other process. It is empty if the
        launcher sets no such text.
    """

    launcher: str = ""
    rank: int = 0
    size: int = 1
    node: int = 0
    nodes: int = 1
    local_rank: int = 0
    tasks_here: int = 1
    job: str = ""
    attempt: int = 0
    hosts: tuple[str, ...] = ()
    rendezvous: tuple[str, int] | None = None
    key: str = ""

    @property
    def one_a_node(self) -> bool:
        """Whether the launcher has started one process on each of several machines. Such a process can start the
        workers of its machine itself."""
        return self.size > 1 and self.size == self.nodes

    def variables(self) -> dict[str, str]:
        """Return the environment variables that torchrun would set for this process."""
        if self.size == 1:
            return {}
        named = {"RANK": self.rank, "WORLD_SIZE": self.size}
        named |= {"LOCAL_RANK": self.local_rank, "LOCAL_WORLD_SIZE": self.tasks_here}
        where = dict(zip(("MASTER_ADDR", "MASTER_PORT"), self.rendezvous or (), strict=False))
        return {name: str(value) for name, value in (named | where).items()}

    def record(self) -> dict[str, object]:
        """Return the facts about the launcher's job to record for an attempt of the run. Returns an empty dict if there
        is no job."""
        return {"launcher": self.launcher, "scheduler_job": self.job, "start": self.attempt} if self.job else {}

    def work(self) -> Work:
        """Return the launcher's job and attempt, which a run folder's lock names. An empty `Work` without a job."""
        return Work(f"{self.launcher} job {self.job}", self.attempt) if self.job else Work()

    def told(self, devices: int, nodes: int | None = None) -> str:
        """Return a text such as `Slurm job 4711, 2 nodes × 4 devices, attempt 2`. Returns an empty string if there is
        no launcher.

        devices: the number of devices on all machines.
        nodes: the number of machines that are used. By default, all machines on which the launcher has started a
            process.
        """
        if not self.launcher:
            return ""
        count = self.nodes if nodes is None else nodes
        each = f"{plural(count, 'node')} × {plural(devices // count, 'device')}"
        parts = [f"{self.launcher} job {self.job}" if self.job else self.launcher]
        parts.append(each if devices % count == 0 else f"{plural(count, 'node')}, {plural(devices, 'device')}")
        parts += [f"attempt {self.attempt}"] if self.attempt else []
        if len(self.hosts) > count:
            parts.append(f"{len(self.hosts) - count} more nodes are idle: start the run with srun --ntasks-per-node=1")
        return ", ".join(parts)


ALONE = Place()


def number(environment: Mapping[str, str], name: str, default: int | None = None) -> int:
    """Return the environment variable `name` as a whole number.
    Raises UsageError if it is not a number."""
    text = environment.get(name, "" if default is None else str(default))
    try:
        return int(text)
    except ValueError:
        said = f"{name}={text}" if name in environment else f"{name} is not set"
        raise UsageError(f"{said}. The launcher must set {name} to a whole number.") from None


def place_in(environment: Mapping[str, str]) -> Place:
    """Return the place that a launcher gave a process with these environment variables. Raises UsageError if they are
    invalid."""
    inner = of_torchrun(environment)
    if inner is not None and "LOCAL_RANK" not in environment:
        step = of_slurm(environment)  # a script under `srun` may set RANK by hand, so take the nodes from Slurm
        if step is not None and step.size == inner.size:
            return replace(step, rank=inner.rank, rendezvous=inner.rendezvous)
    if inner is None and ("OMPI_COMM_WORLD_SIZE" in environment or "MPI_LOCALRANKID" in environment):
        inner = of_mpi(environment)  # checked before Slurm: mpirun's ranks inherit the Slurm step of its daemons
    found = inner or of_slurm(environment) or of_mpi(environment) or ALONE
    if found.size > 1 and {"MASTER_ADDR", "MASTER_PORT"} <= environment.keys() and found.rendezvous is None:
        return replace(found, rendezvous=(environment["MASTER_ADDR"], int(environment["MASTER_PORT"])))
    return found


def of_torchrun(environment: Mapping[str, str]) -> Place | None:
    """Return the place of a process that has the variables RANK and WORLD_SIZE.
    None without these."""
    if not {"RANK", "WORLD_SIZE"} <= environment.keys():
        return None
    rank, size = number(environment, "RANK"), number(environment, "WORLD_SIZE")
    pods = {"LOCAL_RANK", "KUBERNETES_SERVICE_HOST"} & environment.keys() == {"KUBERNETES_SERVICE_HOST"}
    pods &= environment.get("MASTER_ADDR") not in LOCAL_HOSTS or "PET_NODE_RANK" in environment
    tasks = 1 if pods else number(environment, "LOCAL_WORLD_SIZE", size)
    agent = "TORCHELASTIC_RUN_ID" in environment
    where = environment.get("MASTER_ADDR"), environment.get("MASTER_PORT", "")
    return Place(
        "torchrun" if agent else "PyTorchJob" if pods else "",
        rank=rank,
        size=size,
        node=rank if pods else number(environment, "GROUP_RANK", rank // max(tasks, 1)),
        nodes=size if pods else number(environment, "GROUP_WORLD_SIZE", -(-size // max(tasks, 1))),
        local_rank=0 if pods else number(environment, "LOCAL_RANK", rank),
        tasks_here=tasks,
        attempt=number(environment, "TORCHELASTIC_RESTART_COUNT", 0) + 1 if agent else 0,
        hosts=(where[0],) if where[0] else (),
        rendezvous=(where[0], int(where[1])) if where[0] and where[1].isdigit() else None,
        key=f"torchrun-{environment['TORCHELASTIC_RUN_ID']}.{where[1]}" if agent else "",
    )


def of_mpi(environment: Mapping[str, str]) -> Place | None:
    """Return the place of this process among all ranks, as mpirun's variables describe it.
    None without these."""
    if number(environment, OPEN + "SIZE", 1) > 1:
        names = [OPEN + name for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")]
        job = environment.get("PMIX_NAMESPACE") or environment.get("OMPI_MCA_ess_base_jobid", "")
        return _place("Open MPI", names, environment, job)
    if number(environment, "PMI_SIZE", 1) > 1:
        names = ["PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"]
        return _place("mpirun", names, environment, "")
    return None


def _place(launcher: str, names: list[str], environment: Mapping[str, str], job: str) -> Place:
    rank, size = number(environment, names[0]), number(environment, names[1])
    here = number(environment, names[3], size)
    hosts = environment.get("SLURM_JOB_NODELIST", "") if here < size else ""
    shared = job or environment.get("SLURM_JOB_ID") or (str(os.getppid()) if here == size else "")
    return Place(
        launcher,
        rank=rank,
        size=size,
        node=rank // here,
        nodes=-(-size // here),
        local_rank=number(environment, names[2], rank),
        tasks_here=here,
        hosts=host_list(hosts) if hosts else (),
        key=f"mpi-{shared}" if shared else "",
    )


def of_slurm(environment: Mapping[str, str], proc: Path = Path("/proc")) -> Place | None:
    """Return the place of this process in a Slurm job. None outside of a job."""
    if JOB not in environment:
        return None
    job, attempt = job_id(environment), number(environment, "SLURM_RESTART_COUNT", 0) + 1
    if number(environment, STEPS, 1) > 1 and (missing := [name for name in OF_STEPS if name not in environment]):
        raise UsageError(
            f"{STEPS} is set without {' and '.join(missing)}. Start the program with srun, or unset {STEPS}."
        )
    if number(environment, STEPS, 1) < 2 or not in_step(environment, proc):
        hosts: tuple[str, ...] = ()
        with contextlib.suppress(UsageError):  # a single process does not need the list
            hosts = host_list(environment.get("SLURM_JOB_NODELIST", ""))
        return Place("Slurm", job=job, attempt=attempt, hosts=hosts)
    tasks = tasks_of_nodes(environment["SLURM_STEP_TASKS_PER_NODE"])
    node, local_rank = number(environment, "SLURM_NODEID"), number(environment, "SLURM_LOCALID")
    if not 0 <= node < len(tasks):
        raise UsageError(f"SLURM_NODEID={node}, but SLURM_STEP_TASKS_PER_NODE lists {len(tasks)} nodes.")
    step = environment.get("SLURM_STEP_ID", "0")
    cluster = environment.get("SLURM_CLUSTER_NAME", "")
    return Place(
        "Slurm",
        # Ranks are sorted by node, then by task. SLURM_PROCID differs under -m cyclic, plane or arbitrary.
        rank=sum(tasks[:node]) + local_rank,
        size=sum(tasks),
        node=node,
        nodes=len(tasks),
        local_rank=local_rank,
        tasks_here=tasks[node],
        job=job,
        attempt=attempt,
        hosts=host_list(environment["SLURM_STEP_NODELIST"]),
        key=f"slurm-{cluster}-{environment[JOB]}.{step}.{attempt}",
    )


def job_id(environment: Mapping[str, str]) -> str:
    """Return the job's id: `4711`, or `4700_3` for a task of a job array."""
    array, task = environment.get("SLURM_ARRAY_JOB_ID"), environment.get("SLURM_ARRAY_TASK_ID")
    return environment[JOB] if array is None or task is None else f"{array}_{task}"


def in_step(environment: Mapping[str, str], proc: Path = Path("/proc")) -> bool:
    """Check whether this process is a task of the Slurm step that its variables SLURM_STEP_* describe."""
    real = re.search(rf"/job_{environment[JOB]}/step_(\w+)", read_text(proc / "self" / "cgroup"))
    return _agree(environment) if real is None else real[1] == environment.get("SLURM_STEP_ID", real[1])


def _agree(environment: Mapping[str, str]) -> bool:
    """Check whether the variables SLURM_STEP_* of this process fit Slurm's other variables, such as SLURM_NTASKS."""
    tasks = tasks_of_nodes(environment["SLURM_STEP_TASKS_PER_NODE"])
    node = number(environment, "SLURM_NODEID", 0)
    nodes = set(host_list(environment["SLURM_STEP_NODELIST"]))
    here = environment.get("SLURM_GTIDS")
    return (
        node < len(tasks)
        and (here is None or len(here.split(",")) == tasks[node])
        and environment.get("SLURM_NTASKS", str(sum(tasks))) == str(sum(tasks))
        and nodes <= set(host_list(environment.get("SLURM_JOB_NODELIST", environment["SLURM_STEP_NODELIST"])))
    )


def host_list(text: str) -> tuple[str, ...]:
    """Expand a Slurm list of hosts: `rack[0-1]n[01-02],big` means rack0n01, rack0n02, rack1n01, rack1n02 and big."""
    names = _NAME.findall(text)
    if not names or ",".join(names) != text.strip():
        raise _refused(text)
    return tuple(itertools.chain.from_iterable(_expanded(name, text) for name in names))


def _expanded(name: str, text: str) -> list[str]:
    parts = [_numbers(part[1:-1], text) if part[0] == "[" else [part] for part in re.findall(r"\[.*?\]|[^\[]+", name)]
    return ["".join(each) for each in itertools.product(*parts)]


def _numbers(ranges: str, text: str) -> list[str]:
    found: list[str] = []
    for part in ranges.split(","):
        match = _RANGE.fullmatch(part)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if match is None or last < first:
            raise _refused(text)
        found += [str(number).zfill(len(match[1])) for number in range(first, last + 1)]
    return found


def _refused(text: str) -> UsageError:
    return UsageError(f"{text!r} is not a Slurm list of hosts, such as n1 or gpu[03-07,9],big1.")


def tasks_of_nodes(text: str) -> tuple[int, ...]:
    """Expand Slurm's counts of tasks: `4(x2),3` means 4, 4 and 3 on three nodes. Raises UsageError for other text."""
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if match is None:
            raise UsageError(f"{text!r} is not a Slurm count of tasks, such as 4(x2),3.")
        counts += [int(match[1])] * int(match[2] or "1")
    return tuple(counts)
