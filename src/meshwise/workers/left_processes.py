"""Name processes that outlive a launch in sessions of their own.

Processes in a worker's process group end with the worker. Tested in tests/faults/test_faults.py.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from pathlib import Path

from meshwise.spec.words import some

MOST_SAID = 8


def said(variable: str, value: str, server: subprocess.Popen[bytes] | None) -> str:
    """Return a sentence that names the processes which still run after the launch that started them has ended. Returns
    an empty string if there are none, or if the system has no /proc.

    The processes of a launch are recognized by an environment variable that the launch has set for them. Processes that
    were just killed get up to half a second to end.

    variable, value: the name and the value of the environment variable.
    server: the fork server, which is left out.
    """
    wanted, deadline = f"{variable}={value}\0".encode(), time.monotonic() + 0.5
    own = (os.getpid(), server.pid if server else 0)
    while (left := _found(wanted, own)) and time.monotonic() < deadline:
        time.sleep(0.05)
    if not left:
        return ""
    named = some([f"{number} ({name})" for number, name in left], MOST_SAID)
    numbers = " ".join(str(number) for number, _ in left[:MOST_SAID])
    return f"These processes still run: {named}. To end them: kill {numbers}"


def _found(wanted: bytes, own: tuple[int, ...]) -> list[tuple[int, str]]:
    """Return the id and the name of each process with `wanted` in its environment. own: the process ids to leave
    out."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if int(path.name) not in own and wanted in (path / "environ").read_bytes():
                found.append((int(path.name), (path / "comm").read_text().strip()))
    return sorted(found)
