"""Agree on facts through the key-value store, without a collective.

The store is that of the process group. Without a collective, no rank can hang in one.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from meshwise.compat.reducer import default_store

POLL, SLOWEST = 0.0005, 0.02  # seconds between two looks: at first, and after a while
TICK = 0.5  # seconds between two looks at where the other ranks are
MISMATCH = 1 << 40  # added to the counter of a fact by a rank that came with another


def agree(key: str, fact: str, ranks: int, seconds: float, gone: Callable[[], bool] = lambda: False) -> str | None:
    """Compare one fact of all ranks, once per `key`: None if they agree. Otherwise return another rank's fact at once,
    or "" if some rank has not come after `seconds`, or will not come, as `gone` tells."""
    store = default_store()
    first = store.compare_set(f"{key}/fact", "", fact).decode()
    if first != fact:
        store.add(f"{key}/count", MISMATCH)
        return first
    store.add(f"{key}/count", 1)
    if not wait_for_all(f"{key}/count", ranks, seconds, gone):
        return ""
    return "something else" if store.add(f"{key}/count", 0) >= MISMATCH else None


def wait_for_all(key: str, ranks: int, seconds: float, gone: Callable[[], bool] = lambda: False) -> bool:
    """Wait until the counter `key` reaches `ranks`; False after `seconds`. Each rank adds 1 beforehand. gone: whether a
    rank is known not to come, called now and then."""
    deadline, pause, look = time.monotonic() + seconds, POLL, time.monotonic() + TICK
    while default_store().add(key, 0) < ranks:
        if (now := time.monotonic()) > deadline or (now > look and gone()):
            return default_store().add(key, 0) >= ranks
        look = now + TICK if now > look else look
        time.sleep(pause)
        pause = min(pause * 1.05, SLOWEST)
    return True
