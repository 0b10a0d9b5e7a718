"""Time operators on real tensors in a separate process.

If an operator crashes, only that process ends, and the crash is reported.

If several workers share the CPU, as many threads run the operator at once, since the workers also share the memory
bandwidth.

Tested in tests/rehearsal/test_measured.py.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from statistics import median

import torch

from meshwise.compat.profiling import allocations_of
from meshwise.machine.memory import free_bytes
from meshwise.rehearsal.calls import bytes_of, made

REPEATS, LONGEST = 7, 0.05
"""How many calls are timed. Fewer, but at least two, if the calls together take more than LONGEST seconds."""
COLD, FLUSHED, IN_CACHE = 3, 64 << 20, 64 << 10
"""An operator on more than IN_CACHE bytes is also timed with empty caches, because in a step some tensors are not in a
cache. For this, COLD calls are timed. Before each call, FLUSHED bytes are written, which displace other data."""
SERVE = "from meshwise.rehearsal.timing import serve; serve()"


def timed(call: str, threads: int, others: int = 0) -> tuple[float | None, Sequence[int], str]:
    """Time an operator call in another process, on `threads` threads, while `others` threads repeat the same call.

    Return three values: the seconds, or None if the call cannot be made; what it allocates internally (see
    `_taken_inside`); and how the call crashed the process, or an empty string.
    """
    child = _child()
    if child.poll() is not None:  # at rest, by someone else
        _child.cache_clear()
        child = _child()
    assert child.stdin is not None and child.stdout is not None
    answer = ""
    with contextlib.suppress(BrokenPipeError):
        child.stdin.write(json.dumps([call, threads, others]) + "\n")
        child.stdin.flush()
        answer = child.stdout.readline()
    if answer:
        seconds, inside = json.loads(answer)
        return seconds, tuple(inside), ""
    _child.cache_clear()
    code = child.wait()
    child.stdin.close()
    child.stdout.close()
    return None, (), signal.Signals(-code).name if code < 0 else f"exit code {code}"


def serve() -> None:
    """Time the calls that are requested on stdin, one line of JSON each, until it is closed. Write the results to
    stdout."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # an operator may print
    for line in sys.stdin:
        call, threads, others = json.loads(line)
        print(json.dumps(timed_here(call, threads, others)), file=answers, flush=True)


def timed_here(call: str, threads: int, others: int = 0) -> tuple[float | None, Sequence[int]]:
    """Time an operator call in this process."""
    with threads_set(threads), torch.no_grad():
        seconds = _timed(call, others) if call else None
        return seconds, () if seconds is None else _taken_inside(call)


@functools.cache
def _child() -> subprocess.Popen[str]:
    """Start the process in which operator calls are timed, and return it."""
    return subprocess.Popen(
        [sys.executable, "-c", SERVE],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )


def _timed(call: str, others: int = 0) -> float | None:
    """Return how many seconds an operator call takes."""
    size = bytes_of(call)
    if size * (1 + others) > free_bytes(torch.device("cpu")) // 4:
        return None
    try:
        operator = made(call)
        if size <= IN_CACHE:
            return median_of(operator, REPEATS)
        with _at_once(call, others):
            seconds = median_of(operator, REPEATS)
            flushed = torch.ones(FLUSHED // 4)
            return math.sqrt(seconds * max(median_of(operator, COLD, lambda: flushed.add_(1)), seconds))
    except (AttributeError, IndexError, RuntimeError, TypeError, ValueError, NotImplementedError):
        return None


@contextlib.contextmanager
def _at_once(call: str, others: int) -> Iterator[None]:
    """Within the context, let `others` threads repeat the call, each on its own tensors."""
    over = threading.Event()

    def work() -> None:
        with torch.no_grad(), contextlib.suppress(Exception):  # what it raises, the one that is timed raises too
            operator = made(call)
            while not over.is_set():
                operator()

    threads = [threading.Thread(target=work, daemon=True) for _ in range(others)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        over.set()
        for thread in threads:
            thread.join()


def _taken_inside(call: str) -> tuple[int, ...]:
    """Return what a call allocates internally, in order, from the events of torch's allocator: the bytes of a block, -n
    where the block that entry n allocated is freed (from 1), and 0 where a result is allocated."""
    own: list[int] = []
    alive: dict[int, int] = {}  # the entry of each block, by address
    for size, address in allocations_of(made(call)):
        own.append(size if size > 0 else -alive.pop(address, 0))
        if size > 0:
            alive[address] = len(own)
    for entry in alive.values():
        own[entry - 1] = 0
    return tuple(own) if any(own) else ()


def median_of(call: Callable[[], object], repeats: int, before: Callable[[], object] | None = None) -> float:
    """Return the median seconds of a call."""
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    call()
    seconds: list[float] = []
    while len(seconds) < 2 or (len(seconds) < repeats and sum(seconds) < LONGEST):
        if before is not None:
            before()
        start = clock()
        call()
        seconds.append(clock() - start)
    return median(seconds)


@contextlib.contextmanager
def threads_set(count: int) -> Iterator[None]:
    """Within the context, set torch's number of threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
