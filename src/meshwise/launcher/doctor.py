"""Look for what would stop or slow a run on this machine.

Devices, links and limits are found as for `meshwise devices`. Here is what a run needs besides: versions, who launched
this process, where torch listens, and the disk of the run folders.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import shutil
import tempfile
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import psutil

from meshwise import hardware
from meshwise.hardware.allowance import bound_cores, cpu_quota, memory_left
from meshwise.hardware.discovery.limits import CONTAINER, SHELL, Finding, limits_that_hurt, surroundings
from meshwise.records.code_files import code_files
from meshwise.spec.machine import Host, Machine
from meshwise.spec.units import bandwidth_text, bytes_text
from meshwise.workers.control_groups import read_text
from meshwise.workers.place import Place, place_in

PACKAGE = Path(__file__).parents[1] / "__init__.py"
LIBRARIES = ("numpy", "transformers", "lightning", "ray")
UNLISTED = "is not in the catalog"  # a note that is no matter of health
LEAST_FREE = 2 * 2**30
"""Bytes that should be free for the states of a run."""
LEAST_RATE = 20e6
"""Bytes/s. Below, a state of 1 GB takes a minute to save."""
NETWORKED = ("nfs", "lustre", "gpfs", "beegfs", "ceph", "gluster", "cifs", "smb", "9p", "virtiofs", "fuse", "afs")
PIECE, PIECES, SECONDS = 4 * 2**20, 16, 2.0  # a write is measured over 64 MiB, for at most this long
PATIENCE = 5.0  # seconds to wait for gloo, which asks for the address of this machine's name
EVERYWHERE = ("0.0.0.0", "::")
SYS_PTRACE = 19  # the number of the capability


@dataclass(frozen=True)
class Health:
    """What a machine is like, and what would stop or slow a run on it.

    facts: what was looked at, and what was found.
    gloo: the address at which gloo listens. It is empty if gloo does not start.
    folder: the folder of the run folders, or the nearest one above it that exists.
    """

    machine: Machine
    facts: Mapping[str, str]
    findings: tuple[Finding, ...]
    gloo: str
    folder: Path

    def report(self, program: str) -> dict[str, object]:
        """Return what the nodes of a run compare (see `judge`).

        program: a script or a job whose files are compared. It may be empty.
        """
        own = json.dumps(code_files(str(PACKAGE))).encode()
        return {
            "name": self.machine.hosts[0].name,
            "folder": str(self.folder),
            "versions": dict(self.machine.versions),
            "files": {"meshwise": hashlib.sha256(own).hexdigest()[:16], **code_files(program)},
            "findings": [[each.what, each.figure, each.why, each.mend] for each in self.findings],
        }


def examine(out: Path, environment: Mapping[str, str] = os.environ) -> Health:
    """Examine this machine. This takes a few seconds, and writes and removes a file of at most 64 MiB.

    out: the folder in which run folders are made. It need not exist.
    """
    machine = hardware.machines.find_machine()
    host, place, inside = machine.hosts[0], place_in(environment), surroundings(environment)
    store, gloo = listening()
    folder = next(each for each in (out.absolute(), *out.absolute().parents) if each.is_dir())
    disk, findings = disk_of(folder)
    limits = host.limits
    facts = {
        "launcher": _launcher(place, len(machine.devices), inside),
        "cores": _cores(host),
        "memory": _memory(host),
        "/dev/shm": bytes_text(limits["shared memory"]) if "shared memory" in limits else "unknown",
        "nofile": f"{limits['open files']:,.0f}" if "open files" in limits else "unlimited",
        "memlock": bytes_text(limits["locked memory"]) if "locked memory" in limits else "unlimited",
        "ptrace": _ptrace(),
        "listens": f"torch's store at {store}, gloo at {gloo or 'no address'}",
        "disk": disk,
    }
    notes = tuple(each for each in machine.warnings if UNLISTED not in each)
    machine = replace(machine, versions={**versions(), **machine.versions}, warnings=notes)
    return Health(machine, facts, (*limits_that_hurt(machine, inside=inside), *findings), gloo, folder)


def versions() -> dict[str, str]:
    """Return the versions of Python, meshwise and the installed libraries."""
    found = {"meshwise": version("meshwise"), "python": platform.python_version()}
    for name in LIBRARIES:
        with contextlib.suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def listening() -> tuple[str, str]:
    """Start torch's store and gloo, and return where each listens: `every interface`, `127.0.0.1`, or an empty
    string."""
    found = ["", ""]
    kept: list[object] = []  # else the first is closed before the second is open

    def open_both() -> None:
        import torch.distributed as dist

        limit, before = timedelta(seconds=PATIENCE), _listeners()
        kept.append(dist.TCPStore("127.0.0.1", 0, None, True, limit, False))  # type: ignore[attr-defined]
        between = _listeners()
        found[0] = _where(between - before)
        kept.append(dist.ProcessGroupGloo(dist.HashStore(), 0, 1, limit))  # type: ignore[attr-defined]
        found[1] = _where(_listeners() - between)

    def quietly() -> None:
        with contextlib.suppress(RuntimeError, OSError):
            open_both()

    opening = threading.Thread(target=quietly, daemon=True)
    opening.start()
    opening.join(PATIENCE)
    return found[0], found[1]


def _listeners() -> set[tuple[str, int]]:
    sockets = psutil.Process().net_connections("tcp")
    return {(each.laddr.ip, each.laddr.port) for each in sockets if each.status == psutil.CONN_LISTEN}


def _where(opened: set[tuple[str, int]]) -> str:
    return ", ".join("every interface" if address in EVERYWHERE else address for address, _ in sorted(opened))


def disk_of(folder: Path) -> tuple[str, list[Finding]]:
    """Measure the disk of a folder. Return it in words, and what would stop or slow a run."""
    free, kind = shutil.disk_usage(folder).free, _filesystem(folder)
    other = "--out FOLDER, on another disk"
    if free < LEAST_FREE:
        figure = f"{bytes_text(free)} free"
        return f"{folder}: {kind}", [Finding("disk", figure, "states of a run may not fit", other)]
    try:
        rate = _write_rate(folder)
    except OSError as error:
        figure = f"{folder} ({error.strerror})"
        return f"{folder}: {kind}", [Finding("disk", figure, "a run cannot write there", other)]
    words = f"{folder}: {kind}, {bytes_text(free)} free, written at {bandwidth_text(rate)}"
    slow = Finding("disk", bandwidth_text(rate), "states take long to save", other)
    return words, [slow] if rate < LEAST_RATE else []


def _filesystem(folder: Path) -> str:
    mounts = {Path(each.mountpoint): each.fstype for each in psutil.disk_partitions(all=True)}
    resolved = folder.resolve()
    kind = next((mounts[each] for each in (resolved, *resolved.parents) if each in mounts), "unknown")
    sort = "network" if kind.startswith(NETWORKED) else "memory" if kind in ("tmpfs", "ramfs") else "local"
    return f"{sort} disk ({kind})" if sort != "memory" else f"memory ({kind})"


def _write_rate(folder: Path) -> float:
    """Return the bytes/s of a write to a file that ends on the disk. Raises OSError if nothing can be written."""
    piece, began, written = os.urandom(PIECE), time.monotonic(), 0
    with tempfile.NamedTemporaryFile(prefix=".meshwise-doctor-", dir=folder) as file:
        while written < PIECE * PIECES and time.monotonic() - began < SECONDS:
            written += file.write(piece)
            os.fsync(file.fileno())
    return written / (time.monotonic() - began)


def _launcher(place: Place, devices: int, inside: str) -> str:
    told = place.told(devices * place.nodes if place.one_a_node else place.size)
    return told or "none" + (f" ({inside})" if inside != SHELL else "")


def _cores(host: Host) -> str:
    text, quota = f"{host.cores} of {host.cores_present}", cpu_quota()
    bound = len(bound_cores())
    text += f", bound to {bound}" if bound != host.cores_present else ""
    return text + (f", quota {quota:g}" if quota is not None else "")


def _memory(host: Host) -> str:
    left = memory_left()
    free = psutil.virtual_memory().available
    text = f"{bytes_text(free if left is None else min(free, left))} free of {bytes_text(host.memory or 0)}"
    return text + (f", limited from {bytes_text(host.memory_present or 0)}" if left is not None else "")


def _ptrace() -> str:
    """Return whether py-spy and gdb may attach. It is no finding: meshwise needs neither to name a line that hangs."""
    scope = read_text(Path("/proc/sys/kernel/yama/ptrace_scope"))
    status = dict(line.partition(":\t")[::2] for line in read_text(Path("/proc/self/status")).splitlines())
    may = int(status.get("CapEff", "0"), 16) >> SYS_PTRACE & 1
    if may or scope in ("", "0"):
        return "allowed"
    more = ", docker run --cap-add=SYS_PTRACE" if surroundings() == CONTAINER else ""
    return f"children only (yama {scope}): py-spy and gdb do not attach{more}"
