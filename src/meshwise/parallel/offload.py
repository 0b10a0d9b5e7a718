"""Offload activations to the host until the backward needs them.

They are fetched back a little before their use.

Tensors that a forward saves for its backward are copied to the host: on a GPU, to pinned memory and on a separate
stream, so that the computation continues. A backward requests these tensors in reverse order. So each request also
begins to fetch tensors that were saved earlier, until `WINDOW` bytes are on the device that have not been requested.

Parameters are not copied, because they are on the device anyway. Of a block that is recomputed in the backward, only
the input is copied; what the option `selective` keeps inside the block stays on the device. The model's `forward` is
wrapped. The model's class, hooks and state_dict keys stay.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from meshwise.parallel.blocks import called_in
from meshwise.parallel.technique import Setup, Technique
from meshwise.spec.devices import has_streams
from meshwise.torch_compat import fake_device
from meshwise.torch_compat.dispatch import StorageMap, rehearsing
from meshwise.torch_compat.fake import is_plain
from meshwise.torch_compat.modules import put_forward
from meshwise.torch_compat.reducer import base_of, version

SMALLEST = 1024  # bytes: smaller tensors are not worth a copy
WINDOW = 256 << 20  # bytes to fetch ahead of use


@dataclass(eq=False)
class _HostCopy:
    """A storage that was copied to host memory. number: its index among the storages that the forward has offloaded."""

    number: int
    copy: Tensor
    device: torch.device
    version: int
    place: tuple[Any, ...]
    base: weakref.ref[Tensor]
    views: int = 0
    requested: int = 0
    ready: Tensor | None = None
    arrived: torch.Event | None = None

    def holds(self, tensor: Tensor) -> bool:
        """Return whether `tensor` still has the values that were copied to the host."""
        same = self.place == _place(tensor) or self.base() is base_of(tensor)
        return same and self.version == version(tensor)

    @property
    def ahead(self) -> bool:
        """Whether the storage was fetched to the device in advance, before the backward has asked for it."""
        return self.ready is not None and not self.requested


def _place(tensor: Tensor) -> tuple[Any, ...]:
    return int(tensor.storage_offset()), tensor.size(), tensor.stride()


@dataclass(frozen=True)
class _View:
    """A tensor as a view of a storage in host memory. It keeps the strides, because compiled code relies on them."""

    of: _HostCopy
    dtype: torch.dtype
    offset: int
    size: torch.Size
    stride: tuple[int, ...]


@dataclass
class _SavedTensors:
    """The storages that one forward has offloaded, in order. Autograd owns them; this object holds only weak
    references."""

    window: int
    sent: list[weakref.ref[_HostCopy]] = field(default_factory=list)
    fetched: list[weakref.ref[_HostCopy]] = field(default_factory=list)
    known: StorageMap = field(default_factory=StorageMap)

    def to_host(self, tensor: Tensor) -> Tensor | _View:
        """Return a host copy of a tensor that autograd will save, or the tensor itself if it stays."""
        if not _goes(tensor):
            return tensor
        known: weakref.ref[_HostCopy] | None = self.known.get(tensor)
        waiting = known() if known is not None else None
        if waiting is None or not waiting.holds(tensor):
            waiting = _send(tensor, len(self.sent))
            self.sent.append(weakref.ref(waiting))
            self.known.set(tensor, self.sent[-1])
        waiting.views += 1
        return _View(waiting, tensor.dtype, int(tensor.storage_offset()), tensor.size(), tensor.stride())

    def to_device(self, kept: Tensor | _View) -> Tensor:
        """Return the tensor that `to_host` received. It is fetched from the host if it is not on the device."""
        if isinstance(kept, Tensor):
            return kept
        waiting = kept.of
        if waiting.ready is None:
            _fetch(waiting)
        flat = waiting.ready
        assert flat is not None
        if waiting.arrived is not None:
            stream = torch.get_device_module(waiting.device).current_stream(waiting.device)
            stream.wait_event(waiting.arrived)
            _used_in(flat, stream)
        waiting.requested += 1
        if waiting.requested >= waiting.views:
            waiting.ready = None
        self._fetch_ahead(waiting.number)
        empty = torch.empty(0, dtype=kept.dtype, device=waiting.device)
        return empty.set_(flat.untyped_storage(), kept.offset, kept.size, kept.stride)

    def _fetch_ahead(self, number: int) -> None:
        """Begin to copy storages back to the device before the backward asks for them."""
        self.fetched = [ref for ref in self.fetched if (kept := ref()) is not None and kept.ahead]
        held = sum(kept.copy.nbytes for ref in self.fetched if (kept := ref()) is not None)
        for index in reversed(range(number)):
            kept = self.sent[index]()
            if kept is None or kept.requested or kept.ready is not None:
                continue
            if held + kept.copy.nbytes > self.window:
                break
            _fetch(kept)
            self.fetched.append(self.sent[index])
            held += kept.copy.nbytes


def offload_activations(model: nn.Module, window: int | None = None) -> None:
    """Keep in host memory what the forward of `model` saves for its backward."""
    for root in called_in(model):
        put_forward(root, functools.partial(_offloaded, root.forward, WINDOW if window is None else window))


def _offloaded(forward: Callable[..., Any], window: int, /, *arguments: Any, **keywords: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(*arguments, **keywords)
    own = _SavedTensors(window)
    with torch.autograd.graph.saved_tensors_hooks(own.to_host, own.to_device):
        return forward(*arguments, **keywords)


def _goes(tensor: Tensor) -> bool:
    """Return whether to offload a tensor: it must be plain, strided, not small, and neither a parameter nor a view of
    one."""
    plain = is_plain(tensor) and tensor.layout == torch.strided and not tensor.is_conj() and not tensor.is_neg()
    return plain and not isinstance(base_of(tensor), nn.Parameter) and tensor.nbytes >= SMALLEST


def _send(tensor: Tensor, number: int) -> _HostCopy:
    """Copy the whole storage of a tensor to the host, on a separate stream if the device has streams."""
    storage = tensor.untyped_storage()
    flat = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage, 0, (storage.nbytes(),), (1,))
    copy = torch.empty_like(flat, device="cpu", pin_memory=has_streams(tensor.device))
    stream = _copying(tensor.device)
    if stream is not None:
        stream.wait_stream(torch.get_device_module(tensor.device).current_stream(tensor.device))
        _used_in(flat, stream)
    with _on(stream):
        copy.copy_(flat, non_blocking=stream is not None)
    return _HostCopy(number, copy, tensor.device, version(tensor), _place(tensor), weakref.ref(base_of(tensor)))


def _fetch(waiting: _HostCopy) -> None:
    """Begin to copy a storage back to the device."""
    stream = _copying(waiting.device)
    with _on(stream):
        waiting.ready = waiting.copy.to(waiting.device, non_blocking=True, copy=True)
    waiting.arrived = None if stream is None else stream.record_event()


def _used_in(tensor: Tensor, stream: Any) -> None:
    """Prevent the allocator from reusing the memory of a tensor before `stream` has finished with the tensor."""
    if not rehearsing():
        tensor.record_stream(stream)


@functools.cache
def _copying(device: torch.device) -> Any:
    """Return the stream on which to copy between the host and `device`. Return None if copies are synchronous."""
    beside = has_streams(device) or device.type == fake_device.NAME
    return torch.get_device_module(device).Stream(device) if beside else None


def _on(stream: Any) -> contextlib.AbstractContextManager[Any]:
    return contextlib.nullcontext() if stream is None else stream


def _apply(setup: Setup) -> None:
    setup.parts_on_host = "parameters" in setup.plan.offload
    if "activations" in setup.plan.offload:
        offload_activations(setup.model)


OFFLOAD = Technique(apply=_apply)
