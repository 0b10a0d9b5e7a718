"""Simulate strict CPU devices in one process.

Programs for many devices can then be tested without such devices.

    with virtual_devices(4) as devices:
        x = torch.zeros(3, device="cpu:1")       lives on virtual device 1; so does x + 1
        x + torch.zeros(3, device=devices[2])    UsageError: add mixes cpu:1 and cpu:2
        y = to(x, "cpu:2")                       the one function that copies

torch itself treats `cpu:1` as `cpu`. Here, the virtual device of each storage is recorded. Results are on the device of
the inputs, views on the device of their base, and gradients on the device of their parameter. As in torch, a 0-d host
tensor may be combined with tensors of any device, and an index may be on the host. `x.to`, `x.copy_`, `x[...] = y` and
`module.to` between devices go through `transfer.copy`, so that `devices.on_copy` and the log see every byte. A tensor
without a recorded device is on the host.

Not covered: streams and speed, tensors without a storage (sparse ones), other threads, `out` memory of C++ code, and
the gradient of a 0-d host parameter that is used on a device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from meshwise.spec.errors import UsageError
from meshwise.spec.machine import HOST
from meshwise.torch_compat.dispatch import intercept_operators, operator_name, written_arguments
from meshwise.torch_compat.tree import tensors_in
from meshwise.transfer.copy import moved_to
from meshwise.transfer.devices import OPEN_DEVICES, UNDECIDED, VirtualDevices, as_device, device_of, name_of

MOST = 1024  # most devices to make, as a guard against typos


@contextmanager
def virtual_devices(count: int) -> Iterator[VirtualDevices]:
    """Open `count` strict virtual devices, `cpu:0` and so on, for this thread inside the `with` block.

    Operators refuse tensors of different virtual devices, as they do for real devices. Raises UsageError for an
    impossible count, or if virtual devices are open already.
    """
    if not isinstance(count, int) or not 1 <= count <= MOST:
        raise UsageError(f"virtual_devices({count}): the number of devices must be an integer from 1 to {MOST}.")
    if OPEN_DEVICES:
        raise UsageError("virtual_devices: some virtual devices are open already. Use those, or close them first.")
    devices = VirtualDevices(torch.device("cpu", index) for index in range(count))
    rules = _Rules(devices)
    OPEN_DEVICES.append(devices)
    try:
        with intercept_operators(rules.operator), rules:
            yield devices
    finally:
        OPEN_DEVICES.remove(devices)


class _Rules(TorchFunctionMode):
    """Refuses operators whose tensors are on different virtual devices, and records the virtual device of each
    result."""

    def __init__(self, devices: VirtualDevices) -> None:
        super().__init__()
        self.devices, self.places = devices, devices.places
        self.maker_is_user = False
        """Whether the running torch function got no tensor of a virtual device.
        New tensors are then on the host."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.devices.paused:
            return func(*args, **kwargs)
        if func in _SPECIAL:
            return _SPECIAL[func](func, args, kwargs)
        before = self.maker_is_user
        self.maker_is_user = all(self.places.get(tensor) is None for tensor in tensors_in((args, kwargs)))
        try:
            return func(*args, **kwargs)
        finally:
            self.maker_is_user = before

    def operator(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.devices.paused:
            return func(*args, **kwargs)
        name = operator_name(func)
        wanted = kwargs.get("device")
        asked = as_device(wanted) if wanted is not None and wanted.type == "cpu" and wanted.index is not None else None
        if name == "_to_copy" and asked is not None:
            return func(moved_to(args[0], asked, "to"), *args[1:], **(kwargs | {"device": None}))
        if name == "copy_" and UNDECIDED not in [self.places.get(tensor) for tensor in tensors_in(args)]:
            args = (args[0], moved_to(args[1], device_of(args[0]), "copy_"), *args[2:])
        place = self._common_place(name, func, args, kwargs)
        if asked is not None:
            place, kwargs = asked.index, kwargs | {"device": torch.device("cpu")}
        result = func(*args, **kwargs)
        for tensor in tensors_in(result):
            if place is not None and tensor.is_cpu and self.places.get(tensor) is None:
                self.places.set(tensor, place)
        return result

    def _common_place(self, name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int | None:
        """Return the number of the inputs' virtual device, or None for the host. Raises UsageError if they differ."""
        get = self.places.get
        every = list(tensors_in((args, kwargs)))
        if not every:
            return None if self.maker_is_user else UNDECIDED
        met = list(tensors_in((args[0], args[2:]))) if name in _INDEXING else every
        found: set[int | None] = {get(tensor) for tensor in met if tensor.dim() or get(tensor) is not None}
        # Include a 0-d host tensor that is written: the result must be on its device.
        found |= {get(tensor) for tensor in tensors_in(written_arguments(func, args, kwargs))}
        found.discard(UNDECIDED)
        if len(found) > 1:
            first, second, *_ = sorted(found, key=lambda place: (place is None, place))
            raise UsageError(
                f"{name} mixes tensors of {_words(first)} and {_words(second)}. Move one: mw.to(tensor, 'cpu:{first}')."
            )
        undecided = [tensor for tensor in every if get(tensor) == UNDECIDED]
        if not found:
            return UNDECIDED if undecided else None
        (place,) = found
        if place is not None:
            for tensor in undecided:
                self.places.set(tensor, place)
        return place


_INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index", "_unsafe_index_put"}
"""Operators whose index tensors may be on the host, as in torch."""


def _words(place: int | None) -> str:
    return "the host, cpu" if place is None else f"cpu:{place}"


def _to(func: Any, args: Any, kwargs: Any) -> Any:
    """Handle tensor.to(device, dtype), .to(other), .to(dtype) and their keywords."""
    tensor, *rest = args
    rest, kwargs = list(rest), dict(kwargs)
    asked = kwargs.pop("device", None)
    other = kwargs.pop("other", None)
    if rest and asked is None and isinstance(rest[0], str | int | torch.device):
        asked = rest.pop(0)
    elif rest and isinstance(rest[0], Tensor):
        other = rest.pop(0)
    if other is not None:
        asked, kwargs["dtype"] = device_of(other), other.dtype
    if rest and rest[0] is None:
        rest.pop(0)  # Module.to may pass None as the dtype
    elif rest and isinstance(rest[0], torch.dtype):
        kwargs["dtype"] = rest.pop(0)
    kwargs |= dict(zip(("non_blocking", "copy"), rest, strict=False))
    if asked is None:
        return func(tensor, **kwargs)
    if torch.device(asked).type != "cpu":
        return func(tensor, asked, **kwargs)
    moved = moved_to(tensor, as_device(asked), "to")
    kwargs["copy"] = bool(kwargs.get("copy")) and moved is tensor
    return func(moved, **({"dtype": tensor.dtype} | kwargs))


def _copy_(func: Any, args: Any, kwargs: Any) -> Any:
    kwargs = dict(kwargs)
    dst, src, *rest = args if len(args) > 1 else (*args, kwargs.pop("other"))
    return func(dst, moved_to(src, device_of(dst), "copy_"), *rest, **kwargs)


def _set_item(func: Any, args: Any, kwargs: Any) -> None:
    tensor, index, value = args
    func(tensor, index, moved_to(value, device_of(tensor), "copy_") if isinstance(value, Tensor) else value)


def _made_from_values(func: Any, args: Any, kwargs: Any) -> Any:
    """Call torch.tensor or a similar function, and return its tensor on the virtual device that the argument `device`
    names. These functions do not pass `device` to an operator, so `_Rules.operator` cannot see it."""
    asked = kwargs.get("device")
    if asked is None or torch.device(asked).type != "cpu":
        return func(*args, **kwargs)
    target = as_device(asked)
    made = func(*args, **(kwargs | {"device": None}))
    return moved_to(made, target, "to") if args and made is args[0] else _placed(made, target)


def _placed(tensor: Any, device: torch.device) -> Any:
    """Record that `tensor` is on `device`, and return the tensor."""
    if name_of(device) != HOST:
        OPEN_DEVICES[-1].places.set(tensor, device.index)
    return tensor


def _host_only(func: Any, args: Any, kwargs: Any) -> Any:
    device = device_of(args[0])
    if name_of(device) != HOST:
        raise UsageError(f"NumPy cannot read a tensor of {name_of(device)}: write mw.to(tensor, 'cpu') first.")
    return func(*args, **kwargs)


def _new_tensor(func: Any, args: Any, kwargs: Any) -> Any:
    """Call tensor.new_tensor, which makes a tensor from values, by default on the tensor's device."""
    return _made_from_values(func, args, {"device": device_of(args[0])} | kwargs)


_SPECIAL: dict[Any, Callable[[Any, Any, Any], Any]] = {
    torch.Tensor.device.__get__: lambda func, args, kwargs: device_of(args[0]),
    torch.Tensor.to: _to,
    torch.Tensor.cpu: lambda func, args, kwargs: moved_to(args[0], torch.device("cpu"), "to"),
    torch.Tensor.copy_: _copy_,
    torch.Tensor.__setitem__: _set_item,
    torch.Tensor.numpy: _host_only,
    torch.Tensor.__array__: _host_only,
    torch.Tensor.__deepcopy__: lambda func, args, kwargs: _placed(func(*args, **kwargs), device_of(args[0])),
    torch.Tensor.new_tensor: _new_tensor,
    torch.tensor: _made_from_values,
    torch.as_tensor: _made_from_values,
    torch.asarray: _made_from_values,
}
