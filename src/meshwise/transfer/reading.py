"""Read a sharded tensor on all ranks together, or raise.

A rank that reads alone gets an error instead of waiting forever.

Reading is a collective. Before it, each rank writes to the key-value store what it reads, and in which source line. A
rank that has not done so may just be slow. But if that rank has entered more collectives than the waiting rank, in a
group of which both are members, it is already past this line, since all ranks enter collectives in the same order. A
thread on every rank publishes in the store how many collectives the rank has entered, whenever that number has not
changed for a while.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import sys
import threading
import time
from collections.abc import Callable, Iterator

import torch.distributed as dist

from meshwise.spec.errors import UsageError
from meshwise.spec.user_code import user_place
from meshwise.torch_compat.dispatch import rehearsing
from meshwise.torch_compat.reducer import default_store
from meshwise.transfer import collectives, stages

KEY = "meshwise/read"
ENDED = "ended"
POLL, SLOWEST = 0.0005, 0.02  # seconds between two polls, at first and later
TICK = 0.5  # seconds between checks of this rank's progress, and of the other ranks'
MISMATCH = 1 << 40  # in `agree`, a rank whose fact differs adds this to the counter

SHARDED = (
    "{here}: rank {rank} reads a sharded tensor, and {other}. Each rank has a part of the tensor, so all ranks must "
    "read it in the same line. Read the value in code that every rank runs: `value = p.norm().item()` on every rank, "
    "then `if mw.is_main(): print(value)`."
)

_past = [0]  # the number of reads that all ranks have reached
_unmet = [False]  # whether `meet` returns at once; not thread-local, because a backward runs in other threads


@contextlib.contextmanager
def together() -> Iterator[None]:
    """Make `meet` return at once inside the `with` block, instead of waiting for the other ranks.

    This is for meshwise's own code, which all ranks run anyway.
    """
    before, _unmet[0] = _unmet[0], True
    try:
        yield
    finally:
        _unmet[0] = before


def meet(what: str, sentence: str = SHARDED) -> None:
    """Wait until every rank has reached the same source line, in order to read `what` there.

    In a pipeline, only ranks with the same stages as this rank are waited for. Raises UsageError if a rank reads
    something else, or will certainly not reach this line.
    sentence: the text of the error, with the fields `here`, `rank` and `other`.
    """
    pipe, rank = stages.pipe(), _own()
    ranks = range(collectives.world_size(collectives.everyone())) if pipe is None else pipe.same_stage
    if _unmet[0] or len(ranks) == 1 or rehearsing():
        return
    number, here, store = _past[0], user_place(), default_store()
    own, before = f"{KEY}/{number}/{rank}", f"{KEY}/{number - 1}/{rank}"
    keys = {other: f"{KEY}/{number}/{other}" for other in ranks if other != rank}
    store.set(own, f"{here}|{what}")
    try:
        _wait_for(keys, here, sentence)
    except UsageError:
        store.delete_key(own)
        raise
    store.delete_key(before)  # all ranks have passed the previous read
    _past[0] += 1
    for other, key in keys.items():
        there, _, facts = store.get(key).decode().partition("|")
        if (there, facts) != (here, what):
            raise _said(sentence, here, f"rank {other} is at {there or 'other code'}")


def _wait_for(keys: dict[int, str], here: str, sentence: str) -> None:
    store, pause, look = default_store(), POLL / 5, time.monotonic() + TICK
    while not store.check(list(keys.values())):
        time.sleep(pause)
        pause = min(pause * 1.05, SLOWEST)
        if time.monotonic() > look:
            look = time.monotonic() + TICK
            for other, key in keys.items():
                where = _past_us(other) if not store.check([key]) else None
                if where is not None:
                    raise _said(sentence, here, f"rank {other} {where}")


def _said(sentence: str, here: str, other: str) -> UsageError:
    return UsageError(sentence.format(here=here or "the program", rank=_own(), other=other))


def someone_is_past() -> bool:
    """Return True if some rank will certainly not enter the collectives that this rank is about to enter.

    This is so if that rank has entered more collectives than this rank, or has ended.
    """
    ranks = range(collectives.world_size(collectives.everyone()))
    return any(_past_us(other) is not None for other in ranks if other != _own())


def _past_us(other: int) -> str | None:
    """Describe where rank `other` is, if it has ended or entered more collectives than this rank.
    Otherwise None."""
    store, key = default_store(), f"{KEY}/at/{other}"
    if not store.check([key]):
        return None
    text = store.get(key).decode()
    if text == ENDED:
        return "has reached the end of the program"
    there, counts = json.loads(text)
    shared = [key for key in counts if str(_own()) in key.partition("/")[0].split(",")]
    past = any(counts[key] > collectives.entered[key] for key in shared)
    return f"has gone on to {there or 'other code'}" if past else None


def _own() -> int:
    return collectives.get_rank(collectives.everyone())


def look_out() -> None:
    """Start a thread that publishes this rank's progress in the process group's store: its source line, and how many
    collectives it has entered. It does so whenever the rank has not entered a collective for a while, and when the
    program ends."""
    if not rehearsing():
        _look_out()


@functools.cache
def _look_out() -> None:
    main, store, rank = threading.main_thread().ident, default_store(), _own()
    over = threading.Event()

    def watch() -> None:
        before, said = dict(collectives.entered), False
        while dist.is_initialized() and not over.wait(TICK):
            now = dict(collectives.entered)
            if now == before and not said:
                where = user_place(sys._current_frames().get(main or 0))  # do not keep the frame: it keeps models alive
                store.set(f"{KEY}/at/{rank}", json.dumps([where, now]))
            said, before = now == before, now

    def run() -> None:
        with contextlib.suppress(RuntimeError, ValueError):  # the group and its store may be gone
            watch()

    def ended() -> None:
        over.set()
        thread.join()  # a thread that is using the store at interpreter exit would abort the process
        with contextlib.suppress(RuntimeError):
            store.set(f"{KEY}/at/{rank}", ENDED)

    atexit.register(ended)
    thread = threading.Thread(target=run, name="meshwise-lookout", daemon=True)
    thread.start()


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
