"""Serve torch's TCPStore at an address, or reach it there.

It listens to whoever reaches its port. Two steps of one job, or two jobs on a node, may come to one port, so
the first process writes the name of its start into the store, and those of another start leave.
"""

from __future__ import annotations

import os
import sys
import time
from datetime import timedelta
from typing import Any

from meshwise.spec.errors import UsageError
from meshwise.workers.ports import listening_as

COME = 600.0  # seconds for the process that serves the store to come
TRY = 5.0  # seconds for one try to reach it; Ctrl-C takes effect between two tries
PATIENCE = 20.0  # seconds after which a process says what it waits for
OTHER_PORT = "Set MASTER_PORT, or --master-port, to a free port of the first machine."
START = "meshwise/start"


def served(address: tuple[str, int], start: str) -> Any:
    """Serve a store at a port of this machine, for the processes of a start. Raises UsageError if the port is in
    use."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    host, port = address
    try:
        listener = listening_as(host, port)
    except OSError as error:
        why = os.strerror(error.errno or 0)
        raise UsageError(f"this process cannot listen at port {port} ({why}). {OTHER_PORT}") from None
    store = TCPStore(
        host, port, None, True, wait_for_workers=False, multi_tenant=True, master_listen_fd=listener.detach()
    )
    store.compare_set(START, "", start)
    return store


def reached(address: tuple[str, int], start: str, who: str) -> Any:
    """Connect to the store that the first process of a start serves, once it is there. who: this process, in words.

    Raises UsageError if it is the store of another start, OSError if nobody serves a store there.
    """
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    host, port = address
    began, told = time.monotonic(), False
    while True:
        try:
            store = TCPStore(host, port, None, False, timedelta(seconds=TRY), wait_for_workers=False)
            break
        except Exception as error:  # torch raises several kinds, also while the host has no name yet
            waited = time.monotonic() - began
            if waited > PATIENCE and not told:
                print(f"{who} waits for the first machine at {host}:{port}", file=sys.stderr, flush=True)
                told = True
            if waited > COME:
                raise OSError(str(error).splitlines()[0]) from None
            time.sleep(0.1)
    store.set_timeout(timedelta(seconds=COME))
    until = time.monotonic() + PATIENCE
    while not store.check([START]) and time.monotonic() < until:
        time.sleep(0.02)
    there = store.get(START).decode() if store.check([START]) else "one without a name"
    if there != start:
        raise UsageError(f"{host}:{port} is the meeting point of another start: {there}, not {start}. {OTHER_PORT}")
    return store
