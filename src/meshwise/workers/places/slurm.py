"""Read the variables of Slurm.

A batch script of Slurm has SLURM_PROCID and SLURM_NTASKS too, although it is one process. Only a step has the variables
SLURM_STEP_*, but a batch script that was submitted from inside a step inherits that step's variables. A process's step
is known from its control group; without one, the step's variables are trusted if they agree with those that Slurm sets
again for every task and batch script.
"""

from __future__ import annotations

import contextlib
import itertools
import re
from collections.abc import Mapping
from pathlib import Path

from meshwise.spec.errors import UsageError
from meshwise.workers.control_groups import read_text
from meshwise.workers.places.place import Place, number

JOB = "SLURM_JOB_ID"
STEPS = "SLURM_STEP_NUM_TASKS"
OF_STEPS = ("SLURM_STEP_TASKS_PER_NODE", "SLURM_STEP_NODELIST", "SLURM_NODEID", "SLURM_LOCALID")
_NAME = re.compile(r"(?:[^,\[\]\s]|\[[^\[\]]*\])+")
_RANGE = re.compile(r"(\d+)(?:-(\d+))?")


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
