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

from meshwise.torch_compat.c_methods import replaced

Lane = tuple[int, int]
"""A CUDA stream: the index of its device, and its handle. Or the host."""
HOST: Lane = (-1, 0)
Listener = Callable[..., None]
"""Gets the name of what happens and its arguments, in the thread where it happens: `record, event, stream`; `wait,
event, stream`, when a stream is told to wait, or `wait, event, HOST`, `await_stream, stream` and `await_device,
device`, when the host has waited or a query has returned True; `delete, event`; `allocate, address, stream`; `free,
address`; and `release`, when `empty_cache` has returned memory."""
LATE = 0.02  # seconds to delay each `synchronize`, so that a thread that wrongly does not wait for it comes first
_listeners = list[Listener]()
_told = threading.local()


def current_stream(device: int) -> Lane:
    """Return the current stream of this thread on a device."""
    return device, torch._C._cuda_getCurrentRawStream(device)


def node_of_backward() -> str:
    """Return the name of the autograd node that this thread is running, such as `MulBackward0`. Return an empty string
    outside of a backward."""
    return str(getattr(torch._C._current_autograd_node(), "name", str)())


@contextlib.contextmanager
def listen(listener: Listener) -> Iterator[None]:
    """In the block, report every traced use of CUDA events, streams and memory to `listener`."""
    _begin_to_tell()
    real = torch.cuda.empty_cache

    def empty_cache() -> None:
        real()
        listener("release")

    with contextlib.ExitStack() as stack:
        for kind, awaited in _AWAITED:
            for name in ("query", "synchronize"):
                stack.enter_context(replaced(kind, name, functools.partial(_telling, listener, awaited)))
        stack.enter_context(patch.object(torch.cuda, "empty_cache", empty_cache))
        stack.callback(_listeners.clear)
        _listeners.append(listener)
        yield


_AWAITED: tuple[tuple[Any, Callable[[Any], tuple[Any, ...]]], ...] = (
    (torch.cuda.Event, lambda event: ("wait", event.cuda_event, HOST)),
    (torch.Event, lambda event: ("wait", event.event_id, HOST)),
    *((kind, lambda stream: ("await_stream", lane_of(stream))) for kind in (torch.cuda.Stream, torch.Stream)),
)


def lane_of(s: torch.Stream) -> Lane:
    """Return the index of the device and the handle of a CUDA stream."""
    known = torch.cuda.Stream(stream_id=s.stream_id, device_index=s.device_index, device_type=s.device_type)
    return known.device_index, known.cuda_stream


def _telling(listener: Listener, awaited: Callable[[Any], tuple[Any, ...]], real: Any) -> Any:
    """Wrap `query` or `synchronize` of events or streams, so that it tells what has been completed."""

    def call(self: Any) -> Any:
        if real.__name__ == "synchronize" and threading.active_count() > 1:
            time.sleep(LATE)
        with patch.object(_told, "later", True, create=True):
            over = real(self)
        if over is not False and getattr(self.device, "type", "cuda") == "cuda":
            listener(*awaited(self))
        return over

    return call


@functools.cache
def _begin_to_tell() -> None:
    here = torch._C._cuda_getDevice
    torch._C._activate_gpu_trace()
    trace.register_callback_for_event_record(_tell("record", lambda event, stream: (event, (here(), stream))))
    trace.register_callback_for_event_wait(_tell("wait", lambda event, stream: (event, (here(), stream))))
    trace.register_callback_for_event_deletion(_tell("delete", lambda event: (event,)))
    trace.register_callback_for_event_synchronization(_tell("wait", lambda event: (event, HOST), False))
    trace.register_callback_for_stream_synchronization(_tell("await_stream", lambda s: ((here(), s),), False))
    trace.register_callback_for_device_synchronization(_tell("await_device", lambda: (here(),)))
    trace.register_callback_for_memory_allocation(_tell("allocate", lambda at: (at, current_stream(here()))))
    trace.register_callback_for_memory_deallocation(_tell("free", lambda at: (at,)))


def _tell(name: str, arguments: Callable[..., tuple[Any, ...]], at_once: bool = True) -> Callable[..., None]:
    def tell(*traced: int) -> None:
        for listener in _listeners if at_once or not getattr(_told, "later", False) else ():
            listener(name, *arguments(*traced))

    return tell
