"""Trace CUDA streams, events and memory through torch's sanitizer hooks.

Queries of events and streams, which the hooks leave out, are added.

Read in torch 2.11, 2.13 and 2.15: `cuda/_gpu_trace.py`, `c10/cuda/CUDAEvent.h`, `CUDAFunctions.h`. The trace
cannot be switched off: it goes to a listener, or nowhere. Freed memory is given by its address alone, on any device.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
from torch.cuda import _gpu_trace as trace

Place = tuple[int, int]
"""A CUDA stream: the index of its device, and its handle."""


class Listener(Protocol):
    """Receives the traced CUDA events. Each method is called in the thread where the event happens."""

    def record(self, event: int, stream: Place) -> None:
        """Note that a CUDA event was recorded in a stream."""

    def wait(self, event: int, stream: Place) -> None:
        """Note that a stream was told to wait for a CUDA event."""

    def delete(self, event: int) -> None:
        """Note that a CUDA event was deleted."""

    def await_event(self, event: int) -> None:
        """Note that a CUDA event is completed: the host has waited for the event, or a query has returned True."""

    def await_stream(self, stream: Place) -> None:
        """Note that all work in a stream is completed: the host has waited for it, or a query has returned True."""

    def await_device(self, device: int) -> None:
        """Note that all work on a device is completed, because the host has waited for the device's streams."""

    def allocate(self, address: int, stream: Place) -> None:
        """Note that memory was allocated for use in a stream."""

    def free(self, address: int) -> None:
        """Note that memory was freed."""

    def release(self) -> None:
        """Note that `empty_cache` has returned cached free memory to the device."""


LATE = 0.02  # seconds
_listener: Listener | None = None
_told = threading.local()


def can_listen() -> bool:
    """Return whether this build of torch supports CUDA and has the hooks of the CUDA sanitizer."""
    return hasattr(torch._C, "_activate_gpu_trace") and torch.backends.cuda.is_built()


def current_stream(device: int) -> Place:
    """Return the current stream of this thread on a device."""
    return device, torch._C._cuda_getCurrentRawStream(device)


def node_of_backward() -> str:
    """Return the name of the autograd node that this thread is running, such as `MulBackward0`. Return an empty string
    outside of a backward."""
    node = torch._C._current_autograd_node()
    return "" if node is None else node.name()


@contextlib.contextmanager
def listen(listener: Listener) -> Iterator[None]:
    """In the block, report every traced use of CUDA events, streams and memory to `listener`."""
    global _listener
    _begin_to_tell()
    changed: list[tuple[Any, str, Callable[[Any], Any]]]
    changed = [(torch.cuda.Event, n, _of_event(n)) for n in ("query", "synchronize")]
    changed += [(torch.cuda.Stream, n, _of_stream(n)) for n in ("query", "synchronize")]
    changed += [(torch.cuda, "empty_cache", _released)]
    kept = [(owner, name, getattr(owner, name)) for owner, name, _ in changed]
    for owner, name, around in changed:
        setattr(owner, name, around(getattr(owner, name)))
    _listener = listener
    try:
        yield
    finally:
        _listener = None
        for owner, name, real in kept:
            setattr(owner, name, real)


def _around(tell: Callable[[Listener, Any], None]) -> Callable[[str], Callable[[Any], Any]]:
    """Return a function that takes the name `query` or `synchronize`, and returns a decorator for this method of CUDA
    events or streams. The decorated method calls `tell(listener, event or stream)` if the work is completed.

    If the process has several threads, `synchronize` first sleeps for LATE seconds. During this time, a thread that
    forgets to wait for this thread goes on, so that the listener sees the race."""

    def named(name: str) -> Callable[[Any], Any]:
        def around(real: Any) -> Any:
            def call(self: Any) -> Any:
                _told.later = True
                if name == "synchronize" and threading.active_count() > 1:
                    time.sleep(LATE)
                try:
                    over = real(self)
                finally:
                    _told.later = False
                if _listener is not None and (over or name == "synchronize"):
                    tell(_listener, self)
                return over

            return call

        return around

    return named


_of_event = _around(lambda listener, event: listener.await_event(event.cuda_event))
_of_stream = _around(lambda listener, stream: listener.await_stream((stream.device.index, stream.cuda_stream)))


def _released(real: Callable[[], None]) -> Callable[[], None]:
    def empty_cache() -> None:
        real()
        if _listener is not None:
            _listener.release()

    return empty_cache


_begun = False


def _begin_to_tell() -> None:
    global _begun
    if _begun:
        return
    _begun = True
    here = torch._C._cuda_getDevice
    torch._C._activate_gpu_trace()
    trace.register_callback_for_event_record(_tell(lambda to, event, s: to.record(event, (here(), s))))
    trace.register_callback_for_event_wait(_tell(lambda to, event, s: to.wait(event, (here(), s))))
    trace.register_callback_for_event_deletion(_tell(lambda to, event: to.delete(event)))
    trace.register_callback_for_event_synchronization(_tell(lambda to, event: to.await_event(event), False))
    trace.register_callback_for_stream_synchronization(_tell(lambda to, s: to.await_stream((here(), s)), False))
    trace.register_callback_for_device_synchronization(_tell(lambda to: to.await_device(here())))
    trace.register_callback_for_memory_allocation(_tell(lambda to, at: to.allocate(at, current_stream(here()))))
    trace.register_callback_for_memory_deallocation(_tell(lambda to, at: to.free(at)))


def _tell(what: Callable[..., None], at_once: bool = True) -> Callable[..., None]:
    def tell(*arguments: int) -> None:
        if _listener is not None and (at_once or not getattr(_told, "later", False)):
            what(_listener, *arguments)

    return tell
