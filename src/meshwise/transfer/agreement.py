"""Agree on facts through the key-value store, without a collective.

The store is that of the process group. Since no collective is used, no rank can hang in one.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from meshwise.compat.reducer import default_store

POLL, SLOWEST = 0.0005, 0.02  # seconds between two looks: at first, and after a while
TICK = 0.5  # seconds between two looks at where the other ranks are
MISMATCH = 1 << 40  # added to the counter of a fact by a rank that came with another


def agree(key: str, fact: str, ranks: int, seconds: float, gone: Callable[[], bool] = lambda: False) -> str | None:
    """Compare a fact between all ranks through the key-value store. Every rank must call this once per `key`.

    Returns None if all ranks gave the same fact. If the facts differ, returns a different fact that a rank gave, or
    "something else" if it is not known here. Returns "" if a rank has not called this within `seconds`.
    gone: called while waiting. If it returns True, some rank will never call this, and the wait ends at once.
    """
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
    """Wait until a counter in the store has reached `ranks`, and return whether it has.

    Each rank adds 1 to the counter before it calls this. Waiting ends after `seconds`.
    key: the name of the counter.
    gone: a function that is called every half second. If it returns True, some rank will never add to the counter, and
    waiting ends.
    """
    deadline, pause, look = time.monotonic() + seconds, POLL, time.monotonic() + TICK
    while default_store().add(key, 0) < ranks:
        if (now := time.monotonic()) > deadline or (now > look and gone()):
            return default_store().add(key, 0) >= ranks
        look = now + TICK if now > look else look
        time.sleep(pause)
        pause = min(pause * 1.05, SLOWEST)
    return True
