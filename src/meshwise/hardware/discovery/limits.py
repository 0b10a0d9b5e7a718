"""Name the limits of a host that will stop or slow training.

Each has the line that mends it, as one writes it where this process runs: in a Slurm job, a pod, a container, a shell.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from meshwise.spec.machine import Host, Machine
from meshwise.spec.units import bytes_text, plural

SHARED_MEMORY = 2**30
"""The minimum size of /dev/shm for NCCL and data loaders, in bytes. NCCL's guide asks for `--shm-size=1g`."""
OPEN_FILES_EACH = 512
"""The number of open files that one worker needs for data loaders, shared tensors and connections (an estimate)."""
MEMORY_EACH = 2**30
"""The bytes of memory that one worker needs for torch alone, before any model (an estimate)."""
SLURM, POD, CONTAINER, SHELL = "Slurm", "Kubernetes", "container", "shell"
MARKS = (Path("/.dockerenv"), Path("/run/.containerenv"))
"""Files that docker and podman put into each container."""


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
    ports = sys / "class/infiniband"
    rdma = ports.is_dir() and any(ports.iterdir())
    for at, host in enumerate(machine.hosts):
        kinds = [device.kind for device in machine.devices if device.host == at]
        found += _of_host(host, kinds, rdma, inside or surroundings())
    return list(dict.fromkeys(found))


def _of_host(host: Host, kinds: list[str], rdma: bool, inside: str) -> list[Finding]:
    found: list[Finding] = []
    devices, others = plural(len(kinds), "device"), len(kinds) - kinds.count("cpu")

    def hurts(what: str, figure: str, why: str, **mends: str) -> None:
        mend = mends.get(inside.lower(), mends["shell"])
        found.append(Finding(what, figure, why, mend))

    if (shared := host.limits.get("shared memory", math.inf)) < SHARED_MEMORY:
        hurts(
            *("/dev/shm", bytes_text(shared), "data loaders and NCCL need more shared memory"),
            shell="mount -o remount,size=8g /dev/shm",
            container="docker run --shm-size=8g",
            kubernetes="a volume at /dev/shm: emptyDir: {medium: Memory, sizeLimit: 8Gi}",
        )
    need = OPEN_FILES_EACH * len(kinds)
    if (files := host.limits.get("open files", math.inf)) < need:
        more = 2 ** math.ceil(math.log2(need))
        hurts(
            *("nofile", f"{files:,.0f}", f"too few open files for the data loaders of {devices}"),
            shell=f"ulimit -n {more}",
            container=f"docker run --ulimit nofile={more}",
        )
    if rdma and "locked memory" in host.limits:
        hurts(
            *("memlock", bytes_text(host.limits["locked memory"]), "InfiniBand locks the memory that it sends"),
            shell="ulimit -l unlimited",
            container="docker run --ulimit memlock=-1",
            slurm="LimitMEMLOCK=infinity for slurmd, and PropagateResourceLimitsExcept=MEMLOCK in slurm.conf",
        )
    if host.cores is not None and host.cores < others:
        hurts(
            *("cores", str(host.cores), f"the workers of {devices} wait for each other"),
            shell=f"taskset -c 0-{others - 1}",
            container=f"docker run --cpus={others}",
            kubernetes=f"resources: {{limits: {{cpu: {others}}}}}",
            slurm=f"#SBATCH --cpus-per-task={others}",
        )
    if host.memory is not None and host.memory < MEMORY_EACH * len(kinds):
        gib = 4 * len(kinds)
        hurts(
            *("memory", bytes_text(host.memory), f"torch alone needs more for the workers of {devices}"),
            shell=f"systemd-run --scope -p MemoryMax={gib}G",
            container=f"docker run --memory={gib}g",
            kubernetes=f"resources: {{limits: {{memory: {gib}Gi}}}}",
            slurm=f"#SBATCH --mem={gib}G",
        )
    return found
