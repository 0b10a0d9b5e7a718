"""Describe a process's place among those of its launcher.

The place is read from environment variables.

Tested in tests/workers/test_places.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from meshwise.records.lock import Work
from meshwise.spec.errors import UsageError
from meshwise.spec.units import plural


@dataclass(frozen=True)
class Place:
    """The place of one process among the `size` processes that a launcher started. Without a launcher, it is the only
    one.

    launcher: `Slurm`, `torchrun`, … An empty string without a launcher.
    node, nodes: the index of the process's machine, and the number of machines.
    job: the id of the launcher's job.
    attempt: how often the launcher has started the job, from 1. 0 if unknown.
    hosts: the names of the machines in the order of the nodes, if known. There are more than `nodes` if some machines
        of a job run no process.
    rendezvous: the host and the port of rank 0, if the launcher sets them.
    key: a text that only the processes of one start share.
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
        """Whether there is one process on each of several machines. It may start the workers of its machine."""
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
        """Return the facts about this place to record for an attempt. An empty dict without a job."""
        return {"launcher": self.launcher, "scheduler_job": self.job, "start": self.attempt} if self.job else {}

    def work(self) -> Work:
        """Return the launcher's job, as the owner to be named in the lock of a run folder. Without a job, the owner is
        unknown."""
        return Work(f"{self.launcher} job {self.job}", self.attempt) if self.job else Work()

    def told(self, devices: int, nodes: int | None = None) -> str:
        """Return a text such as `Slurm job 4711, 2 nodes × 4 devices, attempt 2`. An empty string without a launcher.

        devices: the number of devices on all nodes.
        nodes: the number of nodes that are used. By default, all nodes of this place.
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
    """Return a whole number from the environment. Raises UsageError if it is no whole number, or missing without a
    default."""
    text = environment.get(name, "" if default is None else str(default))
    try:
        return int(text)
    except ValueError:
        said = f"{name}={text}" if name in environment else f"{name} is not set"
        raise UsageError(f"{said}. The launcher must set {name} to a whole number.") from None
