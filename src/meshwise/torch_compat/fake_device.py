"""Simulate a GPU: a device `sim` with streams and events.

The streams and events record which launches wait for which.

Fake tensors on it behave as on CUDA: optimizers use foreach, FSDP2 uses streams, attention uses a fused kernel. torch
registers the device as PrivateUse1, once in a process; it is an accelerator only while a rehearsal uses it.
Based on torch 2.11, 2.13 and 2.15: `utils/backend_registration.py`, `utils/_device.py`,
`aten/src/ATen/native/transformers/attention.cpp`.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils import _device

from meshwise.torch_compat import fake_autocast

NAME, TOLD = "sim", "cuda"  # the name that torch uses, and the name that programs see
_users = [0]  # number of rehearsals that use the device now
_stream: list[Stream] = []
_pending: dict[str, set[int]] = {}
_last: dict[str, int] = {}
_records = [0]  # number of the current record of launches (see `begin_record`)


class _Done:
    """Base class of the fake device's streams and events. `query()` is always true, because nothing is computed."""

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True


class Stream(_Done):
    """A stream of the fake device. Each launch in a stream has a number.

    The program can make this stream wait for launches in other streams. Their numbers are returned by `launched` when
    the next launch in this stream is recorded."""

    made = 0

    def __init__(self, *args: Any, name: str = "", **kwargs: Any) -> None:
        Stream.made += 1
        self.name = name or f"stream {Stream.made}"
        self._before: list[Stream] = []
        # FSDP2 of torch 2.15 reads these attributes.
        self.stream_id, self.device_index, self.device_type = Stream.made, 0, 20

    def wait_stream(self, other: Stream) -> None:
        self._wait(other.name, _last.get(other.name, -1))

    def wait_event(self, event: Event) -> None:
        if event.of == _records[0]:  # launches of earlier records have ended
            self._wait(event.stream, event.at)

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def is_capturing(self) -> bool:
        """Return False, because no CUDA graph is ever captured on this device. Optimizers of torch 2.15 call this
        method."""
        return False

    def _wait(self, stream: str, place: int) -> None:
        if place >= 0 and stream != self.name:  # work within one stream is ordered anyway
            _pending.setdefault(self.name, set()).add(place)

    def __enter__(self) -> Stream:
        self._before.append(_stream[-1])
        _stream[:] = [self]
        return self

    def __exit__(self, *error: object) -> None:
        _stream[:] = [self._before.pop()]


class Event(_Done):
    """An event that was recorded in a stream of the fake device.

    stream: the name of the stream.
    at: the number of the last launch in the stream before the event; -1 if there is none.
    of: the number of the record of launches that was running at the event (see `begin_record`). When a new record
        begins, all earlier launches count as ended, so streams do not wait for old events. FSDP2, for example, keeps
        events until the next step."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.stream, self.at, self.of = "", -1, -1

    def record(self, stream: Stream | None = None) -> Event:
        self.stream = (stream or _stream[-1]).name
        self.at, self.of = _last.get(self.stream, -1), _records[0]
        return self

    def wait(self, stream: Stream | None = None) -> None:
        (stream or _stream[-1]).wait_event(self)


class _Module:
    """The module `torch.sim`: torch uses it for the fake device, as it uses `torch.cuda` for GPUs."""

    def __init__(self) -> None:
        self.Stream, self.Event = Stream, Event

    def is_initialized(self) -> bool:
        return True

    def is_available(self) -> bool:
        return _users[0] > 0

    def current_device(self, *args: Any, **kwargs: Any) -> int:
        return 0

    _get_device_index = current_device

    def device_count(self) -> int:
        return 1

    def current_stream(self, *args: Any) -> Stream:
        return _stream[-1]

    def stream(self, stream: Stream) -> Stream:
        return stream

    def _is_in_bad_fork(self) -> bool:
        return False

    def synchronize(self, *args: Any, **kwargs: Any) -> None:
        pass

    manual_seed_all = set_device = set_rng_state = synchronize

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]

    def get_rng_state(self, *args: Any) -> Tensor:
        return torch.zeros(16, dtype=torch.uint8)


def is_there() -> bool:
    """Return whether the fake device exists now, that is, during a rehearsal of a program on fake tensors."""
    return _users[0] > 0


def stream_of() -> Stream:
    """Return the current stream of the fake device."""
    return _stream[-1]


def launched(stream: str, place: int) -> tuple[int, ...]:
    """Record a launch in a stream. Return the numbers of the launches in other streams for which this launch has to
    wait.

    stream: the name of the stream.
    place: the number of the launch."""
    _last[stream] = place
    return tuple(sorted(_pending.pop(stream, ())))


def last_of(stream: str) -> int:
    """Return the number of the last launch that was recorded in a stream (see `launched`), or -1 if there was none."""
    return _last.get(stream, -1)


@contextmanager
def fake_device(main: str) -> Iterator[str]:
    """Make the fake device available in the block, and yield its name. main: the name of the stream that is current at
    first."""
    _register()
    _users[0] += 1
    _stream[:] = [Stream(name=main)]
    begin_record()
    _device._device_constructors()  # caches the original functions, so call it before the patches
    try:
        real: Any = vars(torch.autograd)["_engine_run_backward"]
        with (
            patch.object(torch.autograd, "_engine_run_backward", _backward_that_tells(real)),
            patch.multiple(torch, tensor=_made_on_host(torch.tensor), as_tensor=_made_on_host(torch.as_tensor)),
            # torch's own function asks C++, which does not know the streams of this device.
            patch.object(torch.accelerator, "current_stream", lambda *device: _stream[-1]),
        ):
            yield NAME
    finally:
        _users[0] -= 1


def _made_on_host(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Wrap a function such as `torch.tensor` to make tensors for the fake device on the CPU, and then move them."""

    @functools.wraps(make)
    def made(data: Any, *args: Any, device: Any = None, **kwargs: Any) -> Tensor:
        where = _device.CURRENT_DEVICE if device is None else device  # CURRENT_DEVICE is set by `with torch.device`
        if where is None or torch.device(where).type not in (NAME, "cuda") or isinstance(data, Tensor):
            return make(data, *args, device=device, **kwargs)
        return make(data, *args, device="cpu", **kwargs).to(NAME)

    return made


def begin_record() -> None:
    """Begin a new record of launches, numbered from 0. All earlier launches count as ended, so no stream has to wait
    for them."""
    _records[0] += 1
    _pending.clear()
    _last.clear()


def _save_pending() -> None:
    """Save the Python error with which a backward is failing, so that `_backward_that_tells` can raise it."""
    try:
        _raise_pending()
    except BaseException as error:
        _put_aside.append(error)


def _backward_that_tells(real: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the function that runs a backward, so that it raises the error that `_save_pending` saved."""

    @functools.wraps(real)
    def backward(*args: Any, **kwargs: Any) -> Any:
        _put_aside.clear()
        try:
            return real(*args, **kwargs)
        except Exception:
            if not _put_aside:
                raise
        raise _put_aside[0]

    return backward


_put_aside: list[BaseException] = []
_raise_pending = ctypes.pythonapi.Py_IsInitialized
"""Raises a pending Python error, as any C call of ctypes does. Looked up in advance: a lookup would clear the error."""


@functools.cache
def _register() -> None:
    from torch.utils.backend_registration import (
        _DummyDeviceGuard,
        _DummyPrivateUse1Hook,
        _setup_privateuseone_for_python_backend,
    )

    class Hook(_DummyPrivateUse1Hook):
        def is_available(self, dev_id: Any = 0) -> bool:
            return _users[0] > 0

        has_primary_context = is_available

    class Guard(_DummyDeviceGuard):
        def type_(self) -> Any:
            _save_pending()
            return torch._C._autograd.DeviceType.PrivateUse1

    _setup_privateuseone_for_python_backend(rename=NAME, backend_module=_Module(), hook=Hook(), device_guard=Guard())
    library = torch.library.Library("aten", "IMPL")
    for key in ("PrivateUse1", "AutogradPrivateUse1"):
        library.impl("scaled_dot_product_attention", _attention, key)
    library.impl("_thnn_fused_gru_cell", _gru_cell, "Meta")
    library.impl("_thnn_fused_gru_cell_backward", _gru_cell_backward, "Meta")
    _kept.extend([library, *fake_autocast.register()])


_kept: list[Any] = []  # kept, because a freed library unregisters its operators


def _gru_cell(gates: Tensor, hidden_gates: Tensor, before: Tensor, *biases: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return fake results of CUDA's fused GRU cell: the next state, and what the backward needs."""
    return torch.empty_like(before), before.new_empty(before.size(0), before.size(1) * 5)


def _gru_cell_backward(gradient: Tensor, kept: Tensor, has_bias: bool) -> tuple[Tensor | None, ...]:
    gates, hidden_gates = (gradient.new_empty(gradient.size(0), gradient.size(1) * 3) for _ in range(2))
    biases = (gates.sum(0), hidden_gates.sum(0)) if has_bias else (None, None)
    return gates, hidden_gates, torch.empty_like(gradient), *biases


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Compute attention by the kernel that CUDA would choose: flash, memory-efficient or unfused."""
    if enable_gqa and key.size(-3) != query.size(-3):
        groups = query.size(-3) // key.size(-3)
        key, value = key.repeat_interleave(groups, -3), value.repeat_interleave(groups, -3)
    narrow = query.dtype in (torch.float16, torch.bfloat16)
    size = query.size(-1)
    fits = query.dim() == 4 and size <= 256 and value.size(-1) == size
    flash: Callable[..., Any] = torch.ops.aten._scaled_dot_product_flash_attention
    if narrow and attn_mask is None and fits:
        padded = -(-size // 8) * 8 - size
        if padded:
            scale = size**-0.5 if scale is None else scale
            query, key, value = (torch.nn.functional.pad(each, (0, padded)) for each in (query, key, value))
        return flash(query, key, value, dropout_p, is_causal, scale=scale)[0][..., :size]  # type: ignore[no-any-return]
    if fits and query.dtype != torch.float64:
        if attn_mask is not None:
            attn_mask = _as_bias(attn_mask, query).expand(*query.shape[:-1], key.size(-2))
        efficient = torch.ops.aten._scaled_dot_product_efficient_attention
        needs = torch.is_grad_enabled() and query.requires_grad
        return efficient(query, key, value, attn_mask, needs, dropout_p, is_causal, scale=scale)[0]  # type: ignore[no-any-return]
    return torch.ops.aten._scaled_dot_product_attention_math(  # type: ignore[no-any-return]
        query, key, value, attn_mask, dropout_p, is_causal, scale=scale
    )[0]


def _as_bias(mask: Tensor, query: Tensor) -> Tensor:
    if mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=query.dtype).masked_fill_(mask.logical_not(), float("-inf"))
