"""Find races between CUDA streams of a program as it runs.

The watcher sees every operator, and every call that orders streams.

An operator belongs to the current stream of its device. If a stream waits for an event during the operator, as NCCL's
stream or the stream of a copy between two devices does, the operator belongs to that stream. Compiled functions run
uncompiled. Not seen: kernels that no operator of torch launches (Triton, other libraries), replays of a CUDA graph,
threads of a program's own that began before, and what `host.py` leaves out.
"""

from __future__ import annotations

import contextlib
import ctypes
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.pool import ThreadPool
from typing import Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

from meshwise.checker.races import host
from meshwise.checker.races.checker import Checker, Race, Touch
from meshwise.checker.races.finding import Finding, LaneNames, find, stack
from meshwise.checker.races.host import PinnedArray
from meshwise.checker.races.memory import region_of
from meshwise.checker.races.order import Order
from meshwise.torch_compat import gpu_trace
from meshwise.torch_compat.c_methods import replaced
from meshwise.torch_compat.compiling import without_compiling
from meshwise.torch_compat.dispatch import (
    StorageMap,
    has_parts,
    intercept_operators,
    is_collective,
    operator_name,
    touched,
    without_interception,
)
from meshwise.torch_compat.driver import is_capturing
from meshwise.torch_compat.gpu_trace import HOST, Lane
from meshwise.torch_compat.torch_function import called

READ_BY_HOST = {"numpy", "__array__", "tolist", "__reduce_ex__"}
SAVES = "safetensors.torch"
"""A library that reads what lies at the address of a tensor."""
POOLS: dict[type, str] = {
    ThreadPoolExecutor: "submit",
    ThreadPool: "apply_async map map_async starmap starmap_async imap imap_unordered",
}
"""Functions that give work to threads that may have been started before."""
PLAIN = (torch.Tensor, torch.nn.Parameter)


_Event = tuple[Any, ...]
"""A call of `Order` or `Checker` that is made inside an operator: its name and its arguments."""


def _print(finding: Finding) -> None:
    print(finding.text, file=sys.stderr, flush=True)


@contextlib.contextmanager
def find_races(notify: Callable[[Finding], None] = _print) -> Iterator[list[Finding]]:
    """Find races between CUDA streams in the with-body. Threads that start there, and what is given to a pool of
    threads there, are watched too. The body runs much slower.

    A race is two accesses of the same memory without synchronization between them, at least one of them a write.

    Yields the list of findings. Each has a sentence, advice, and the source lines of both accesses. A nested call
    yields the list of the outer call. If the program has not used a CUDA device, this is printed at the end.

    notify: a function that is called with each finding as soon as it is found. By default, the finding is printed.
    """
    with watch(notify) as found:
        yield found
    if not torch.cuda.is_initialized():
        print("mw.find_races watched nothing: the program has used no CUDA device", file=sys.stderr, flush=True)


@contextlib.contextmanager
def watch(notify: Callable[[Finding], None]) -> Iterator[list[Finding]]:
    """Find races in the with-body, as `find_races`, but print nothing at the end."""
    global _open
    if _open is not None or not torch.backends.cuda.is_built():
        yield [] if _open is None else _open.found
        return
    _open = watcher = _Watcher(notify)
    threads, files = _in_threads(watcher.inside), host.listen(watcher.used_by_host)
    try:
        with without_compiling(), gpu_trace.listen(watcher.happens), threads, files, watcher.inside():
            yield watcher.found
    finally:
        _open = None


_open: _Watcher | None = None


class _Watcher:
    """Finds races in a running program. It tells a `Checker` which memory the program's operators read and write, and
    which calls make a stream or the host wait for another. It collects the races that the checker finds."""

    def __init__(self, notify: Callable[[Finding], None]) -> None:
        self.found: list[Finding] = []
        self._lines: set[tuple[str, str]] = set()
        self._notify, self._names = notify, LaneNames()
        self._checker = Checker(self._report)
        self._lock, self._own = threading.RLock(), threading.local()
        self._pinned = StorageMap()

    @contextlib.contextmanager
    def inside(self) -> Iterator[None]:
        """Look for races between the operators of this thread, until the `with` block ends."""
        with contextlib.ExitStack() as stack:
            if not getattr(self._own, "inside", False):
                self._own.inside = True
                stack.callback(setattr, self._own, "inside", False)
                stack.enter_context(intercept_operators(self._operator))
                stack.enter_context(_HostReads(self.used_by_host))
            yield

    def _operator(self, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if has_parts(args, kwargs):
            return NotImplemented
        touches, lane, waited = list[Touch](), HOST, False
        events: list[_Event] = []
        self._own.events = events
        try:
            result = operator(*args, **kwargs)
            if not is_capturing():
                with self._lock:
                    lane, touches, waited = self._touches(operator, args, kwargs, result)
            return result
        finally:
            self._own.events = None
            if touches:
                self._insert(lane, touches, events, is_collective(operator))
            if waited:
                events.append(("await_stream", lane))
            with self._lock:
                for event in events:
                    self._tell(*event)

    def _insert(self, lane: Lane, touches: Sequence[Touch], events: list[_Event], collective: bool) -> None:
        """Insert an operator's accesses of memory between the calls that it makes to wait for streams, and those after
        it."""
        at = 0
        waits = [number for number, (name, *of) in enumerate(events) if name == "wait" and of[1] != HOST]
        if waits:
            lane = events[waits[0]][2]
            later = range(waits[0], len(events))
            at = next((n for n in later if events[n][0] == "record" and events[n][2] == lane), len(events))
            if collective:
                self._names.is_nccls(lane)
        events.insert(at, ("touch", lane, touches, stack(gpu_trace.node_of_backward())))

    def _tell(self, name: str, *of: Any) -> None:
        getattr(self._checker.order if hasattr(Order, name) else self._checker, name)(*of)

    def _touches(self, operator: Any, args: Any, *of: Any) -> tuple[Lane, list[Touch], bool]:
        """Return the stream on which an operator runs, the memory that it reads and writes, and whether the host waits
        until the operator is done."""
        name, found, lane, waited = operator_name(operator), list[Touch](), HOST, False
        if name == "record_stream":
            self._checker.record_stream(args[0].untyped_storage().data_ptr(), gpu_trace.lane_of(args[1]))
        for tensor, writes in touched(operator, args, *of):
            if tensor.device.type == "cuda" and (lane == HOST or writes):
                lane = gpu_trace.current_stream(tensor.device.index)
            touch = self._touch(tensor, writes, name)
            found += [] if touch is None else [touch]
            waited |= touch is None and writes and tensor.device.type == "cpu"
        return lane, found, waited and lane != HOST

    def _touch(self, tensor: torch.Tensor, writes: bool, operator: str) -> Touch | None:
        """Describe how an operator reads or writes the memory of `tensor`."""
        storage = tensor.untyped_storage()
        on_cuda = tensor.device.type == "cuda" and storage.device.type == "cuda"  # a fake tensor has no memory
        if not on_cuda and not self._is_pinned(tensor):
            return None
        start, item = storage.data_ptr(), tensor.element_size()
        region = region_of(start + int(tensor.storage_offset()) * item, item, tensor.shape, tensor.stride())
        what = f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}, by {operator}"
        return None if region is None else Touch(start, storage.nbytes(), region, writes, what)

    def _is_pinned(self, tensor: torch.Tensor) -> bool:
        if tensor.device.type != "cpu" or not torch.cuda.is_initialized() or tensor.layout != torch.strided:
            return False
        if self._pinned.get(tensor):
            return True
        with without_interception():
            pinned = tensor.is_pinned()
        if pinned:
            storage = tensor.untyped_storage()
            lo, hi = storage.data_ptr(), storage.data_ptr() + storage.nbytes()
            if not any(lo < end and start < hi for start, end in self._pinned.values()):
                self._checker.forget(lo, hi - lo)  # torch reuses pinned memory only when its copies are done
            self._pinned.set(tensor, (lo, hi))
        return pinned

    def used_by_host(self, used: Any, writes: bool, by: str) -> bool:
        """Report that the host reads or writes a tensor or a buffer. Return whether its memory is pinned."""
        with self._lock, without_interception():
            tensor = used if isinstance(used, torch.Tensor) else _tensor_over(np.asarray(memoryview(used)))
            touch = self._touch(tensor, writes, by)
            if touch is not None:
                self._checker.touch(HOST, [touch], stack())
        return touch is not None

    def _report(self, race: Race) -> None:
        lines = (race.earlier.where.place, race.later.where.place)
        if lines not in self._lines:
            self._lines.add(lines)
            self.found.append(find(race, self._names))
            self._notify(self.found[-1])

    def happens(self, name: str, *of: Any) -> None:
        """Report a call to the checker: at once, or if it orders streams inside an operator, with the operator."""
        event = (name, *of, stack()) if name in ("record", "free") else (name, *of)
        events = getattr(self._own, "events", None)
        if hasattr(Order, name) and events is not None:
            events.append(event)
        else:
            with self._lock:
                self._tell(*event)


def _tensor_over(array: np.ndarray[Any, Any]) -> torch.Tensor:
    """Return the bytes of an array, which may be read-only, as a tensor over the same memory."""
    lo, hi = _byte_bounds(array)
    memory = torch.frombuffer((ctypes.c_byte * max(1, hi - lo)).from_address(lo), dtype=torch.uint8)
    return memory.as_strided((*array.shape, array.itemsize), (*map(abs, array.strides), 1))


_byte_bounds: Any = getattr(np.lib, "array_utils", np).byte_bounds  # NumPy 1 has it in another place


@dataclass(eq=False)
class _HostReads(TorchFunctionMode):
    """Calls `used` when the host reads a tensor by a call that runs no operator, such as `.numpy()`."""

    used: Callable[[Any, bool, str], bool]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, result = called(func), func(*args, **(kwargs or {}))
        reads = name in READ_BY_HOST or (name == "data_ptr" and sys._getframe(1).f_globals.get("__name__") == SAVES)
        reads = reads and type(args[0]) in PLAIN and args[0].device.type == "cpu"
        pinned = reads and self.used(args[0], False, name)
        return result.view(PinnedArray) if pinned and isinstance(result, np.ndarray) else result


@contextlib.contextmanager
def _in_threads(inside: Callable[[], contextlib.AbstractContextManager[None]]) -> Iterator[None]:
    """Run each thread that starts in the body, and what is given to a pool of threads there, inside of `inside()`."""

    def watched(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            with inside():
                return function(*args, **kwargs)

        return call

    def start(real: Callable[..., Any], self: Any) -> None:
        self.run = watched(self.run)
        real(self)

    def given(real: Callable[..., Any]) -> Callable[..., Any]:
        return lambda self, function, *args, **kwargs: real(self, watched(function), *args, **kwargs)

    with contextlib.ExitStack() as stack:
        stack.enter_context(replaced(threading.Thread, "start", lambda real: lambda self: start(real, self)))
        for kind, names in POOLS.items():
            for name in names.split():
                stack.enter_context(replaced(kind, name, given))
        yield
