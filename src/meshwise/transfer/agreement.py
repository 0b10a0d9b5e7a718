"""Agree on facts through the key-value store of the process group: without a collective, so nobody can hang in one."""

from __future__ import annotations

import time

from meshwise.compat.reducer import default_store

POLL = 0.0005  # seconds


def wait_for_all(key: str, ranks: int, seconds: float) -> bool:
    """Whether the counter `key` reaches `ranks` within `seconds`. Each rank adds 1 to it beforehand."""
    deadline = time.monotonic() + seconds
    while default_store().add(key, 0) < ranks:
        if time.monotonic() > deadline:
            return False
        time.sleep(POLL)
    return True
