"""The fork server that is kept for all launches of the tests: workers start in a tenth of a second, not in five.

`make suite` leaves it out, so that every launch there starts as a user's does.
"""

from __future__ import annotations

import importlib
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

from meshwise.workers import fast_exit  # first, as in workers/__main__.py

# isort: split
from meshwise.training.job.options import PRELOAD
from meshwise.workers import fork_server, worker


def start(folder: Path) -> tuple[str, subprocess.Popen[bytes]]:
    """Start it; returns its address."""
    address = str(folder / "fork-server")
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.fork_server", address],
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"},
        cwd=Path(__file__).parents[1],
        stdin=subprocess.DEVNULL,
        start_new_session=True,
    )
    deadline = time.monotonic() + 120
    while not Path(address).exists():
        if process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError("the fork server of the tests did not start")
        time.sleep(0.05)
    return address, process


def serve_many(address: str) -> int:
    """Listen at `address` and serve each launcher that connects, in a process of its own. See fork_server.LISTENS."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as door:
        path = Path(f"{address}.part")
        door.bind(str(path))
        path.chmod(0o600)  # who connects has its words run: nobody but this user
        door.listen()
        path.rename(address)
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for those processes
        while True:
            line, _ = door.accept()
            with line:
                if os.fork() == 0:
                    door.close()
                    return fork_server.serve(line, worker.main)


if __name__ == "__main__":
    worker.die_with_parent()
    for module in PRELOAD:
        importlib.import_module(module)
    fast_exit.exit_now(serve_many(sys.argv[1]))
