"""Name the limits of a host that will stop or slow training.

Each has the line that mends it, as one writes it where this process runs: in a Slurm job, a pod, a container, a shell.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from meshwise.spec.machine import Machine
from meshwise.spec.units import bytes_text, plural

GIB = 2**30
SHARED_MEMORY = GIB
"""The minimum size of /dev/shm for NCCL and data loaders, in bytes. NCCL's guide asks for `--shm-size=1g`."""
OPEN_FILES_EACH = 512
"""The number of open files that one worker needs for data loaders, shared tensors and connections (an estimate)."""
MEMORY_EACH = GIB
"""The bytes of memory that one worker needs for torch alone, before any model (an estimate)."""
SLURM, POD, CONTAINER, SHELL = "Slurm", "Kubernetes", "container", "shell"
MARKS = (Path("/.dockerenv"), Path("/run/.containerenv"))
"""Files that docker and podman put into each container."""
MENDS = {
    ("/dev/shm", SHELL): "mount -o remount,size=8g /dev/shm",
    ("/dev/shm", CONTAINER): "docker run --shm-size=8g",
    ("/dev/shm", POD): "a volume at /dev/shm: emptyDir: {{medium: Memory, sizeLimit: 8Gi}}",
    ("nofile", SHELL): "ulimit -n {files}",
    ("nofile", CONTAINER): "docker run --ulimit nofile={files}",
    ("memlock", SHELL): "ulimit -l unlimited",
    ("memlock", CONTAINER): "docker run --ulimit memlock=-1",
    (
        "memlock",
        SLURM,
    ): "LimitMEMLOCK=infinity for slurmd, and in slurm.conf PropagateResourceLimitsExcept=MEMLOCK",
    ("cores", SHELL): "taskset -c 0-{last}",
    ("cores", CONTAINER): "docker run --cpus={cores}",
    ("cores", POD): "resources: {{limits: {{cpu: {cores}}}}}",
    ("cores", SLURM): "#SBATCH --cpus-per-task={cores}",
    ("memory", SHELL): "systemd-run --scope -p MemoryMax={gib}G",
    ("memory", CONTAINER): "docker run --memory={gib}g",
    ("memory", POD): "resources: {{limits: {{memory: {gib}Gi}}}}",
    ("memory", SLURM): "#SBATCH --mem={gib}G",
}
"""What mends a limit, and where. What stands for a shell mends it everywhere else."""


@dataclass(frozen=True)
class Finding:
    """Something that will stop or slow a run.

    what: what was looked at: `/dev/shm`, `nofile` (open files), `memlock`, `cores`.
    figure: what was found, such as `64.0 MiB`.
    why: what this does to a run.
    mend: the line that mends it, such as `docker run --shm-size=8g`.
    """

    what: str
    figure: str
    why: str
    mend: str

    def __str__(self) -> str:
        return f"{self.what} {self.figure}: {self.why}. Use {self.mend}"


def surroundings(environment: Mapping[str, str] = os.environ) -> str:
    """Return where this process runs, which decides how a limit is raised: SLURM, POD, CONTAINER or SHELL."""
    if "KUBERNETES_SERVICE_HOST" in environment:
        return POD
    if "SLURM_JOB_ID" in environment:
        return SLURM
    boxed = "container" in environment or any(mark.exists() for mark in MARKS)
    return CONTAINER if boxed else SHELL


def limits_that_hurt(machine: Machine, sys: Path = Path("/sys"), inside: str | None = None) -> list[Finding]:
    """Return each limit of a host that will stop or slow training on its devices.

    inside: where this process runs. The default is to find out (see `surroundings`).
    """
    found: list[Finding] = []
    rdma = any((sys / "class/infiniband").glob("*"))
    for at, host in enumerate(machine.hosts):
        kinds = [device.kind for device in machine.devices if device.host == at]
        count, cores, limits = len(kinds), len(kinds) - kinds.count("cpu"), host.limits
        devices = plural(count, "device")
        files = 2 ** math.ceil(math.log2(OPEN_FILES_EACH * max(count, 8)))
        least = (
            (
                "/dev/shm",
                limits.get("shared memory"),
                SHARED_MEMORY,
                "data loaders and NCCL need more shared memory",
            ),
            (
                "nofile",
                limits.get("open files"),
                OPEN_FILES_EACH * count,
                f"few for the data loaders of {devices}",
            ),
            ("memlock", limits.get("locked memory"), math.inf if rdma else 0, "InfiniBand locks what it sends"),
            ("cores", host.cores, cores, f"the workers of {devices} wait for each other"),
            ("memory", host.memory, MEMORY_EACH * count, f"torch alone needs more for the workers of {devices}"),
        )
        for what, figure, need, why in least:
            if figure is not None and figure < need:
                text = f"{figure:,.0f}" if what in ("nofile", "cores") else bytes_text(figure)
                mend = MENDS.get((what, inside or surroundings()), MENDS[what, SHELL])
                mend = mend.format(files=files, cores=cores, last=cores - 1, gib=4 * count)
                found.append(Finding(what, text, why, mend))
    return list(dict.fromkeys(found))
