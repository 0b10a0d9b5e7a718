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
from collections.abc import Mapping
from dataclasses import astuple, dataclass, replace
from datetime import timedelta
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import psutil

from meshwise import hardware
from meshwise.hardware.allowance import bound_cores, cpu_quota
from meshwise.hardware.discovery.limits import SHELL, Finding, limits_that_hurt, surroundings
from meshwise.launcher.code_files import code_files
from meshwise.spec.machine import Machine
from meshwise.spec.units import bytes_text
from meshwise.workers.places.place import Place

PACKAGE = Path(__file__).parents[1] / "__init__.py"
LIBRARIES = ("meshwise", "numpy", "transformers", "lightning", "ray")
LEAST_FREE = 2 * 2**30
"""Bytes that should be free for the states of a run."""
MEND = "--out FOLDER, on another disk"


@dataclass(frozen=True)
class Health:
    """What a machine is like, and what would stop or slow a run on it.

    facts: what was looked at, and what was found.
    gloo: the address at which gloo listens.
    folder: the folder of the run folders, or the nearest one above it that exists.
    """

    machine: Machine
    facts: Mapping[str, str]
    findings: tuple[Finding, ...]
    gloo: str
    folder: Path

    def report(self, program: str) -> dict[str, object]:
        """Return what this node tells the others: its name, folder and findings, and in `alike` what must be the same
        on all nodes.

        program: a script or job whose files are compared. It may be empty.
        """
        digest = hashlib.sha256(json.dumps(code_files(str(PACKAGE))).encode()).hexdigest()[:16]
        return {
            "name": self.machine.hosts[0].name,
            "folder": str(self.folder),
            "findings": [astuple(each) for each in self.findings],
            "alike": {**self.machine.versions, "meshwise's files": digest, **code_files(program)},
        }


def examine(out: Path, place: Place) -> Health:
    """Examine this machine. This takes a few seconds.

    out: the folder in which run folders are made. It need not exist.
    """
    machine, inside = hardware.machines.find_machine(), surroundings()
    host, limits = machine.hosts[0], machine.hosts[0].limits
    folder = next(each for each in (out.absolute(), *out.absolute().parents) if each.is_dir())
    (store, gloo), (disk, findings) = listening(), disk_of(folder)
    told = place.told(len(machine.devices) * place.nodes if place.one_a_node else place.size) or "none"
    facts = {
        "launcher": told + f" ({inside})" * (inside != SHELL and inside not in told),
        "cores": f"{host.cores} of {host.cores_present}, bound to {len(bound_cores())}, quota {cpu_quota() or 'none'}",
        "/dev/shm": bytes_text(limits["shared memory"]) if "shared memory" in limits else "unknown",
        "nofile": f"{limits['open files']:,.0f}" if "open files" in limits else "unlimited",
        "memlock": bytes_text(limits["locked memory"]) if "locked memory" in limits else "unlimited",
        "listens": f"gloo at {gloo}; torch's store at {store}, in a run on one machine at 127.0.0.1",
        "disk": disk,
    }
    machine = replace(machine, versions={**_versions(), **machine.versions})
    return Health(machine, facts, (*limits_that_hurt(machine, inside=inside), *findings), gloo, folder)


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in LIBRARIES:
        with contextlib.suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def listening() -> tuple[str, str]:
    """Start torch's store and gloo, and return where each listens: `every interface`, or an address."""
    import torch.distributed as dist

    before = _listeners()
    store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)  # type: ignore[attr-defined]
    between = _listeners()
    limit = timedelta(seconds=5)
    group = dist.ProcessGroupGloo(dist.HashStore(), 0, 1, limit)  # type: ignore[attr-defined]
    found = between - before, _listeners() - between
    del group, store
    first, second = (", ".join(address for address, _ in sorted(each)) for each in found)
    return "every interface" if first in ("::", "0.0.0.0") else first, second


def _listeners() -> set[tuple[str, int]]:
    sockets = psutil.Process().net_connections("tcp")
    return {(each.laddr.ip, each.laddr.port) for each in sockets if each.status == psutil.CONN_LISTEN}


def disk_of(folder: Path) -> tuple[str, list[Finding]]:
    """Return the free space of a folder's disk in words, and what would stop a run."""
    free = bytes_text(shutil.disk_usage(folder).free)
    words, found = f"{folder}: {free} free", []
    if shutil.disk_usage(folder).free < LEAST_FREE:
        found.append(Finding("disk", f"{free} free", "states of a run may not fit", MEND))
    if not os.access(folder, os.W_OK):
        found.append(Finding("disk", str(folder), "a run cannot write there", MEND))
    return words, found
