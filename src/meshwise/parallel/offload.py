"""Offload: what the backward needs waits in the host's memory, and comes back a little ahead of its use.

Tensors that a forward keeps for its backward are copied to the host: pinned, and on a stream of their own where the
device is a GPU, so that computing goes on. A backward asks for them in the reverse order. So each time that it asks for
one, those before it are begun to be fetched, up to `WINDOW` bytes that are on the device and not yet asked for.

Parameters stay where they are: they are there anyway. A block that runs again in the backward sends its input alone
(what `selective` keeps of its inside stays on the device). The model's `forward` is laid into this; its class, hooks
and state_dict keys stay.
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

SMALLEST = 1024  # bytes: below, a copy costs more than it frees
WINDOW = 256 << 20  # bytes that are fetched ahead of their use


@dataclass
class Moved:
    """What was copied so far: tensors and bytes that went to the host, tensors that came back before they were asked
    for, and the most bytes of such that were on the device at once."""

    tensors: int = 0
    bytes: int = 0
    ahead: int = 0
    most_ahead: int = 0


@dataclass(eq=False)
class _OnHost:
    """A tensor that waits in the host's memory: the `number`th of its forward."""

    number: int
    copy: Tensor
    device: torch.device
    asked: bool = False
    ready: Tensor | None = None
    arrived: torch.cuda.Event | None = None


@dataclass
class _Kept:
    """What one forward has sent to the host, in order. Autograd holds the tensors; here they are only known."""

    moved: Moved
    window: int
    sent: list[weakref.ref[_OnHost]] = field(default_factory=list)
    fetched: list[weakref.ref[_OnHost]] = field(default_factory=list)

    def to_host(self, tensor: Tensor) -> Tensor | _OnHost:
        """Called by autograd with what it would keep."""
        if not _goes(tensor):
            return tensor
        copy = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda, requires_grad=False)
        stream = _copying(tensor.device)
        if stream is not None:
            stream.wait_stream(torch.cuda.current_stream(tensor.device))
            tensor.record_stream(stream)  # its memory is not given out again before the copy is made
        with _on(stream):
            copy.copy_(tensor.detach(), non_blocking=stream is not None)
        self.moved.tensors, self.moved.bytes = self.moved.tensors + 1, self.moved.bytes + tensor.nbytes
        waiting = _OnHost(len(self.sent), copy, tensor.device)
        self.sent.append(weakref.ref(waiting))
        return waiting

    def to_device(self, kept: Tensor | _OnHost) -> Tensor:
        """Called by autograd with what `to_host` gave, when the backward needs it."""
        if isinstance(kept, Tensor):
            return kept
        if kept.ready is None:
            _fetch(kept)
        tensor, kept.ready, kept.asked = kept.ready, None, True
        assert tensor is not None
        if kept.arrived is not None:
            stream = torch.cuda.current_stream(kept.device)
            stream.wait_event(kept.arrived)
            tensor.record_stream(stream)
        self._fetch_ahead(kept.number)
        return tensor

    def _fetch_ahead(self, number: int) -> None:
        """Begin to fetch what was sent before the `number`th, as far as the window goes."""
        self.fetched = [ref for ref in self.fetched if (kept := ref()) is not None and kept.ready is not None]
        held = sum(kept.copy.nbytes for ref in self.fetched if (kept := ref()) is not None)
        for index in reversed(range(number)):
            kept = self.sent[index]()
            if kept is None or kept.asked or kept.ready is not None:
                continue
            if held + kept.copy.nbytes > self.window:
                break
            _fetch(kept)
            self.fetched.append(self.sent[index])
            held += kept.copy.nbytes
            self.moved.ahead, self.moved.most_ahead = self.moved.ahead + 1, max(self.moved.most_ahead, held)


def offload_activations(model: nn.Module, window: int | None = None) -> Moved:
    """Let what `model` keeps for its backward wait in the host's memory; returns the count, which goes on counting.

    window: bytes that are fetched ahead. A model that is only a list of models, and never called itself, passes this on
    to them.
    """
    moved = Moved()
    for root in _called(model):
        changed: Any = root
        kept = functools.partial(_Kept, moved, WINDOW if window is None else window)
        changed.forward = functools.partial(_offloaded, root.forward, kept, moved)
    return moved


def _called(model: nn.Module) -> list[nn.Module]:
    if isinstance(model, nn.ModuleList | nn.ModuleDict):
        return [root for child in model.children() for root in _called(child)]
    return [model]


def _offloaded(
    forward: Callable[..., Any], kept: Callable[[], _Kept], moved: Moved, /, *arguments: Any, **keywords: Any
) -> Any:
    if not torch.is_grad_enabled():
        return forward(*arguments, **keywords)
    own = kept()
    with torch.autograd.graph.saved_tensors_hooks(own.to_host, own.to_device):
        return forward(*arguments, **keywords)


def _goes(tensor: Tensor) -> bool:
    """Whether a tensor goes to the host: no parameter nor a view of one, no small one, none of a kind of its own."""
    source = tensor if tensor._base is None else tensor._base
    plain = type(tensor) is Tensor and tensor.layout == torch.strided
    return plain and not isinstance(source, nn.Parameter) and tensor.nbytes >= SMALLEST


def _fetch(kept: _OnHost) -> None:
    """Begin to copy a tensor back to its device. On one stream with the copies out, so it is after its own."""
    stream = _copying(kept.device)
    with _on(stream):
        kept.ready = kept.copy.to(kept.device, non_blocking=True, copy=True)
    kept.arrived = None if stream is None else stream.record_event()


@functools.cache
def _copying(device: torch.device) -> torch.cuda.Stream | None:
    """The stream of copies between host and `device`; None where copies are made at once."""
    return torch.cuda.Stream(device) if device.type == "cuda" else None


def _on(stream: torch.cuda.Stream | None) -> contextlib.AbstractContextManager[Any]:
    return contextlib.nullcontext() if stream is None else torch.cuda.stream(stream)
