"""Trace CUDA streams, events and memory through torch's sanitizer hooks.

Queries of events and streams, which the hooks leave out, are added.

Based on torch 2.11, 2.13 and 2.15: `cuda/_gpu_trace.py`, `c10/cuda/CUDAEvent.h`, `CUDAFunctions.h`. The trace cannot be
switched off: without a listener, it is dropped. Freed memory is reported by its address alone, without its device.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import torch
from torch.cuda import _gpu_trace as trace

Place = tuple[int, int]
"""A CUDA stream: the index of its device, and its handle."""


Listener = Any
"""What receives the traced events, in the thread where each happens. Its methods: `record(event, stream)`,
`wait(event, stream)` when a stream is told to wait, `delete(event)`, `allocate(address, stream)`, `free(address)`,
`release()` when `empty_cache` has returned memory, and `await_event(event)`, `await_stream(stream)` and
`await_device(device)`, when the host has waited, or a query has returned True: that work is completed."""
LATE = 0.02  # seconds to delay each `synchronize`, so that a thread that wrongly does not wait for it comes first
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
    with contextlib.ExitStack() as stack:
        for kind, tell in _AWAITED:
            for name in ("query", "synchronize"):
                stack.enter_context(patch.object(kind, name, _telling(name, getattr(kind, name), tell)))
        stack.enter_context(patch.object(torch.cuda, "empty_cache", _releasing(torch.cuda.empty_cache)))
        _listener = listener
        try:
            yield
        finally:
            _listener = None


_AWAITED: tuple[tuple[Any, Callable[[Listener, Any], None]], ...] = (
    (torch.cuda.Event, lambda listener, event: listener.await_event(event.cuda_event)),
    (torch.cuda.Stream, lambda listener, stream: listener.await_stream((stream.device.index, stream.cuda_stream))),
)


def _telling(name: str, real: Any, tell: Callable[[Listener, Any], None]) -> Any:
    """Wrap `query` or `synchronize` of CUDA events or streams, so that it calls `tell(listener, event or stream)` if
    the work is completed."""

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


def _releasing(real: Callable[[], None]) -> Callable[[], None]:
    def empty_cache() -> None:
        real()
        if _listener is not None:
            _listener.release()

    return empty_cache


@functools.cache
def _begin_to_tell() -> None:
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
