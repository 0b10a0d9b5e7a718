"""Describe where a process stands among those that its launcher has started."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from meshwise.records.lock import Work
from meshwise.spec.errors import UsageError
from meshwise.spec.units import plural


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
    address: the host and the port of rank 0, where the processes meet. None if the launcher does not say.
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
    address: tuple[str, int] | None = None
    key: str = ""

    def __post_init__(self) -> None:
        if self.address is not None and not 1 <= self.address[1] < 1 << 16:
            raise UsageError(f"port {self.address[1]}: a port is a number from 1 to 65535, such as 29500.")

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
        where = dict(zip(("MASTER_ADDR", "MASTER_PORT"), self.address or (), strict=False))
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
