"""Find races between CUDA streams of a program as it runs.

The watcher sees every operator, and every call that orders streams.

An operator belongs to the current stream of its device. If a stream waits for an event during the operator, as NCCL's
stream or the stream of a copy between two devices does, the operator belongs to that stream. Compiled functions run
uncompiled. Not seen: kernels that no operator of torch launches (Triton, other libraries), replays of a CUDA graph,
`torch.Event.query`, and what NumPy does with pinned memory after `.numpy()`, which counts as a read where it is called.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode

from meshwise.checker.races.checker import Checker, Race, Touch
from meshwise.checker.races.finding import Finding, LaneNames, Tensor, find, is_shown, stack
from meshwise.checker.races.memory import region_of
from meshwise.checker.races.order import HOST, Lane
from meshwise.torch_compat import gpu_trace
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
from meshwise.torch_compat.torch_function import called

READ_BY_HOST = {"numpy", "__array__", "tolist", "__reduce_ex__"}
PLAIN = (torch.Tensor, torch.nn.Parameter)


class _Event(NamedTuple):
    """A call that synchronizes streams, made inside an operator."""

    apply: Callable[[], None]
    waits: Lane | None = None
    records: Lane | None = None


def _print(finding: Finding) -> None:
    print(finding.text, file=sys.stderr, flush=True)


@contextlib.contextmanager
def find_races(notify: Callable[[Finding], None] = _print) -> Iterator[list[Finding]]:
    """Find races between CUDA streams in the with-body, and in threads that start there. The body runs much slower.

    A race is two accesses of the same memory without synchronization between them, at least one of them a write.

    Yields the list of findings, which stays empty without CUDA. Each finding has a sentence, advice, and the source
    lines of both accesses. A nested call yields the list of the outer call.

    notify: a function that is called with each finding as soon as it is found. By default, the finding is printed.
    """
    global _open
    if _open is not None or not gpu_trace.can_listen():
        yield [] if _open is None else _open.found
        return
    _open = watcher = _Watcher(notify)
    try:
        with without_compiling(), gpu_trace.listen(watcher), _in_new_threads(watcher.inside), watcher.inside():
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
        with intercept_operators(self._operator), _HostReads(self._read_by_host):
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
            with self._lock:
                self._settle(lane, touches, events, is_collective(operator))
                if waited:
                    self._checker.synchronize(lane)

    def _settle(self, lane: Lane, touches: Sequence[Touch], events: Sequence[_Event], collective: bool) -> None:
        """Report an operator to the checker, in the order of events: the synchronization calls before it
        touches memory, then its accesses of memory, then the calls after them."""
        at = 0
        waits = next((number for number, event in enumerate(events) if event.waits is not None), None)
        if waits is not None and touches:
            lane = events[waits].waits or lane
            later = range(waits, len(events))
            at = next((number for number in later if events[number].records == lane), len(events))
            if collective:
                self._names.is_nccls(lane)
        for event in events[:at]:
            event.apply()
        if touches:
            self._checker.touch(lane, touches, stack(gpu_trace.node_of_backward()))
        for event in events[at:]:
            event.apply()

    def _touches(
        self, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
    ) -> tuple[Lane, list[Touch], bool]:
        """Return the stream on which an operator runs, the memory that it reads and writes, and whether the host waits
        until the operator is done."""
        name, found, lane, waited = operator_name(operator), list[Touch](), HOST, False
        if name == "record_stream":
            self._checker.record_stream(args[0].untyped_storage().data_ptr(), _lane_of(args[1]))
        for tensor, writes in touched(operator, args, kwargs, result):
            if tensor.device.type == "cuda" and (lane == HOST or writes):
                lane = _lane(gpu_trace.current_stream(tensor.device.index))
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
        if region is None:
            return None
        what = Tensor(str(tensor.dtype).removeprefix("torch."), tensor.shape, operator)
        return Touch(start, storage.nbytes(), region, writes, what)

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

    def _read_by_host(self, tensor: torch.Tensor, by: str) -> None:
        with self._lock:
            touch = self._touch(tensor, False, by)
            if touch is not None:
                self._checker.touch(HOST, [touch], stack())

    def _report(self, race: Race) -> None:
        lines = (race.earlier.where.place, race.later.where.place)
        if lines not in self._lines:
            self._lines.add(lines)
            self.found.append(find(race, self._names, _name_of(race.later.block.lo)))
            self._notify(self.found[-1])

    def _happens(self, event: _Event) -> None:
        events = getattr(self._own, "events", None)
        if events is not None:
            events.append(event)
            return
        with self._lock:
            event.apply()

    def record(self, event: int, stream: gpu_trace.Place) -> None:
        lane, where = _lane(stream), stack()
        self._happens(_Event(lambda: self._checker.order.record(event, lane, where), records=lane))

    def wait(self, event: int, stream: gpu_trace.Place) -> None:
        lane = _lane(stream)
        self._happens(_Event(lambda: self._checker.order.wait(event, lane), waits=lane))

    def delete(self, event: int) -> None:
        self._happens(_Event(lambda: self._checker.order.delete(event)))

    def await_event(self, event: int) -> None:
        self._happens(_Event(lambda: self._checker.order.wait(event, HOST)))

    def await_stream(self, stream: gpu_trace.Place) -> None:
        self._happens(_Event(lambda: self._checker.synchronize(_lane(stream))))

    def await_device(self, device: int) -> None:
        self._happens(_Event(lambda: self._checker.synchronize(*self._checker.order.lanes(f"cuda:{device}"))))

    def allocate(self, address: int, stream: gpu_trace.Place) -> None:
        with self._lock:
            self._checker.allocate(address, _lane(stream))

    def free(self, address: int) -> None:
        with self._lock:
            self._checker.free(address, stack())

    def release(self) -> None:
        with self._lock:
            self._checker.forget_freed()


class _HostReads(TorchFunctionMode):
    """Calls `read` when the host reads a tensor by a call that runs no operator, such as `.numpy()`."""

    def __init__(self, read: Callable[[torch.Tensor, str], None]) -> None:
        super().__init__()
        self._read = read

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = called(func)
        if name in READ_BY_HOST and type(args[0]) in PLAIN and args[0].device.type == "cpu":
            self._read(args[0], name)
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def _in_new_threads(inside: Callable[[], contextlib.AbstractContextManager[None]]) -> Iterator[None]:
    """Run each thread that is started in the body inside a context that `inside()` makes."""
    real = threading.Thread.run

    def run(self: threading.Thread) -> None:
        with inside():
            real(self)

    threading.Thread.run = run  # type: ignore[method-assign]
    try:
        yield
    finally:
        threading.Thread.run = real  # type: ignore[method-assign]


def _lane(stream: gpu_trace.Place) -> Lane:
    return Lane(f"cuda:{stream[0]}", stream[1])


def _lane_of(stream: torch.Stream) -> Lane:
    known = torch.cuda.Stream(
        stream_id=stream.stream_id, device_index=stream.device_index, device_type=stream.device_type
    )
    return _lane((known.device.index, known.cuda_stream))


def _name_of(address: int) -> str:
    """Return the name of the variable that holds the tensor at `address`, such as `x` or `self.x`."""
    frame = sys._getframe(1)
    while frame.f_back is not None and not is_shown(frame.f_code.co_filename):
        frame = frame.f_back
    own = frame.f_locals.get("self")
    names = {f"self.{name}": value for name, value in vars(own).items()} if hasattr(own, "__dict__") else {}
    return next((name for name, value in {**names, **frame.f_locals}.items() if _lies_at(value, address)), "")


def _lies_at(value: Any, address: int) -> bool:
    if type(value) not in PLAIN or value.layout != torch.strided:
        return False
    return bool(value.untyped_storage().data_ptr() == address)
