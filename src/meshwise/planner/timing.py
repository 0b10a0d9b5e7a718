"""Write operator calls as text, and time them on real tensors.

They are timed in a separate process, with tensors of the same shapes, strides and dtypes. If an operator crashes, only
that process ends, and the crash is reported.

If several workers share the CPU, as many threads run the operator at once, since the workers also share the memory
bandwidth.
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import median
from typing import Any

import torch
from torch import Tensor

from meshwise.hardware.memory import free_bytes
from meshwise.torch_compat.dispatch import named_arguments
from meshwise.torch_compat.profiling import allocations_of

_WORDS: dict[type, str] = {
    torch.dtype: "dtype",
    torch.layout: "layout",
    torch.memory_format: "memory_format",
}
UNDRAWN = ("workspace", "reserve", "reserveSpace", "philox_seed", "rng_state")
"""Arguments with data that a forward keeps for its backward. Random data can crash the process, as in oneDNN's LSTM. So
`call_of` returns "" if `workspace` is a tensor, or if any of the other arguments is a tensor with elements."""
LEAST, MOST = 0.1, 1.0
"""The range of random floats in timed calls. Zero, subnormal and negative values make some operators slower."""


def call_of(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """Return an operator call as JSON (the name with its overload, the arguments), or "" if it cannot be timed."""
    given = named_arguments(func, tuple(args), dict(kwargs))
    held = {name: one for name in UNDRAWN if isinstance(one := given.get(name), Tensor)}
    if "workspace" in held or any(one.numel() for one in held.values()):
        return ""
    try:
        return json.dumps(
            [str(func), [_to_json(one) for one in args], {key: _to_json(one) for key, one in kwargs.items()}]
        )
    except TypeError:
        return ""


def made(call: str) -> Callable[[], object]:
    """Return a function that repeats an operator call on the CPU."""
    name, args, kwargs = json.loads(call)
    operator = torch.ops
    for part in name.split("."):
        operator = getattr(operator, part)
    bound = _indices_below(name, args)
    own = [_from_json(one, bound) for one in args]
    named = {key: _from_json(one, bound) for key, one in kwargs.items()}
    return lambda: operator(*own, **named)  # type: ignore[operator]


def bytes_of(call: str) -> int:
    """Return the bytes of the tensors that `made(call)` creates."""

    def of(one: Any) -> int:
        if isinstance(one, list):
            return sum(map(of, one))
        if isinstance(one, dict) and "tensor" in one:
            dtype: torch.dtype = getattr(torch, one["dtype"])
            return _extent(one["tensor"], one["strides"]) * dtype.itemsize
        return 0

    _, args, kwargs = json.loads(call)
    return of(args) + of(list(kwargs.values()))


def _to_json(one: Any) -> Any:
    if isinstance(one, Tensor):
        return {"tensor": list(one.shape), "strides": list(one.stride()), "dtype": str(one.dtype).split(".")[1]}
    if isinstance(one, list | tuple):
        return [_to_json(each) for each in one]
    if one is None or isinstance(one, bool | int | float | str):
        return one
    if type(one) in _WORDS:
        return {_WORDS[type(one)]: str(one).split(".")[1]}
    if isinstance(one, torch.device):
        return {"device": "cpu"}
    raise TypeError(f"an operator has an argument of type {type(one)}, which cannot be written as JSON")


def _from_json(one: Any, bound: int) -> Any:
    if isinstance(one, list):
        return [_from_json(each, bound) for each in one]
    if not isinstance(one, dict):
        return one
    if "tensor" in one:
        return _tensor(one["tensor"], one["strides"], getattr(torch, one["dtype"]), bound)
    (word, value), *_ = one.items()
    return torch.device(value) if word == "device" else getattr(torch, value)


def _tensor(shape: list[int], strides: list[int], dtype: torch.dtype, bound: int) -> Tensor:
    extent = _extent(shape, strides)
    if dtype.is_floating_point:
        flat = torch.empty(extent).uniform_(LEAST, MOST).to(dtype)
    elif dtype == torch.bool:
        flat = torch.rand(extent) < 0.5
    elif dtype.is_complex:
        flat = torch.ones(extent, dtype=dtype)
    else:
        flat = torch.randint(0, bound, (extent,), dtype=dtype)
    return flat.as_strided(shape, strides)


def _extent(shape: Sequence[int], strides: Sequence[int]) -> int:
    """Return how many elements of memory a tensor with this shape and these strides spans."""
    if 0 in shape:
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))


def _indices_below(name: str, args: Sequence[Any]) -> int:
    """Return n, so that all integers from 0 to n - 1 are valid indices for this operator."""
    if "embedding_dense_backward" in name:
        return max(int(args[2]), 1)
    first: list[int] = next((one["tensor"] for one in args if isinstance(one, dict) and "tensor" in one), [])
    if "embedding" in name and first:
        return max(first[0], 1)
    if "nll_loss" in name:
        shapes = [one["tensor"] for one in args if isinstance(one, dict) and len(one.get("tensor", ())) > 1]
        return max(shapes[0][1], 1) if shapes else 1
    return max(min(first, default=1), 1)


REPEATS, LONGEST = 7, 0.05
"""How many calls are timed. Fewer, but at least two, if the calls together take more than LONGEST seconds."""
COLD, FLUSHED, IN_CACHE = 3, 64 << 20, 64 << 10
"""An operator on more than IN_CACHE bytes is also timed with empty caches, because in a step some tensors are not in a
cache. For this, COLD calls are timed. Before each call, FLUSHED bytes are written, which displace other data."""
SERVE = "from meshwise.planner.timing import serve; serve()"


def timed(call: str, threads: int, others: int = 0) -> tuple[float | None, Sequence[int], str]:
    """Time an operator call in another process, on `threads` threads, while `others` threads repeat the same call.
    Return the seconds (None if unknown), the internal allocations, and how the process crashed, if it did."""
    child = _child()
    if child.poll() is not None:  # something has killed the idle process
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
    """Time the calls that are requested on stdin, one line of JSON each, until it is closed."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # an operator may print, which must not mix with the answers
    for line in sys.stdin:
        call, threads, others = json.loads(line)
        print(json.dumps(timed_here(call, threads, others)), file=answers, flush=True)


def timed_here(call: str, threads: int, others: int = 0) -> tuple[float | None, Sequence[int]]:
    """Time an operator call in this process.
    Return the seconds (None if unknown) and the internal allocations."""
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
    """Return how many seconds an operator call takes, or None if it fails or needs too much memory."""
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
        with torch.no_grad(), contextlib.suppress(Exception):  # the timed call raises the same error
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
    """Return a call's allocations in order: the bytes of an internal block, -n to free block n, 0 for a result."""
    own: list[int] = []
    alive: dict[int, int] = {}  # maps the address of a live block to its number n
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
