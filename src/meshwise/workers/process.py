"""What a worker process asks of its operating system: die with its parent, stay on its cores."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys

PR_SET_PDEATHSIG = 1  # linux/prctl.h


def die_with_parent() -> None:
    """On Linux the kernel kills this process when its parent dies, even while it holds Python's lock. Elsewhere the
    closed side channel does it."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def bind_to_cores(cores: str) -> None:
    """Bind this process to the comma-separated `cores`; nothing where the system cannot, or where the text is empty."""
    if cores and hasattr(os, "sched_setaffinity"):
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, {int(core) for core in cores.split(",")})


def kill_group(process: subprocess.Popen[bytes]) -> None:
    """Kill a worker and everything that it started. A worker leads its own process group."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
