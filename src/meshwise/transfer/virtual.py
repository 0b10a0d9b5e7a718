"""Strict virtual CPU devices in one process, so that programs for many devices can be tested without any.

    with virtual_devices(4) as devices:
        x = torch.zeros(3, device="cpu:1")       lives on virtual device 1; so does x + 1
        x + torch.zeros(3, device=devices[2])    UsageError: add mixes cpu:1 and cpu:2
        y = to(x, "cpu:2")                       the one function that copies

torch itself takes `cpu:1` for `cpu`. Here each storage has a place; results live where their inputs do, views share
it, gradients live with their parameter. As in torch, a 0-d tensor of the host may meet any device, and an index may
be the host's. `x.to`, `x.copy_`, `x[...] = y` and `module.to` between places are routed through `transfer.copy`, so
that `devices.on_copy` and the log see every byte. What has no place is the host's.

Not covered: streams and speed, tensors without a storage (sparse ones), other threads, `out` memory of C++ code, and
the gradient of a 0-d parameter of the host used on a device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, overload

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from meshwise.compat.dispatch import intercept_operators, operator_name, written_arguments
from meshwise.compat.tree import tensors_in
from meshwise.spec.errors import UsageError
from meshwise.spec.machine import HOST
from meshwise.transfer.copy import moved_to
from meshwise.transfer.devices import DEVICE_SETS, UNDECIDED, DeviceSet, Hook, as_device, device_of, name_of

MOST = 1024  # a typing slip must not promise a million devices


class VirtualDevices(Sequence[torch.device]):
    """The virtual devices of a block: `devices[1]` is `cpu:1`."""

    def __init__(self, count: int) -> None:
        self.device_set = DeviceSet(count)
        self._devices = [torch.device("cpu", index) for index in range(count)]

    @property
    def on_copy(self) -> Hook | None:
        """Called as (dst, src, path) at each copy between two places, after it was made and before it is verified.

        It may count, wait, or write into `dst`: in it operators are plain ones, without places.
        """
        return self.device_set.on_copy

    @on_copy.setter
    def on_copy(self, hook: Hook | None) -> None:
        self.device_set.on_copy = hook

    @overload
    def __getitem__(self, index: int) -> torch.device: ...
    @overload
    def __getitem__(self, index: slice) -> list[torch.device]: ...
    def __getitem__(self, index: int | slice) -> torch.device | list[torch.device]:
        return self._devices[index]

    def __len__(self) -> int:
        return len(self._devices)


@contextmanager
def virtual_devices(count: int) -> Iterator[VirtualDevices]:
    """`count` strict virtual devices, `cpu:0` and so on, for this thread while the block runs.

    Raises UsageError for an impossible count, or where virtual devices are open already.
    """
    if not isinstance(count, int) or not 1 <= count <= MOST:
        raise UsageError(f"virtual_devices({count}): must be from 1 to {MOST}.")
    if DEVICE_SETS:
        raise UsageError("virtual_devices in virtual_devices: some are open already. Use those, or close them first.")
    devices = VirtualDevices(count)
    rules = _Rules(devices.device_set)
    DEVICE_SETS.append(devices.device_set)
    try:
        with intercept_operators(rules.operator), _Functions(rules):
            yield devices
    finally:
        DEVICE_SETS.remove(devices.device_set)


class _Rules:
    """What each operator may do, and where its result lives."""

    def __init__(self, device_set: DeviceSet) -> None:
        self.device_set = device_set
        self.maker_is_user = False
        """The torch function that runs now was called without any tensor of a device."""

    def operator(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.device_set.paused:
            return func(*args, **kwargs)
        name = operator_name(func)
        wanted = kwargs.get("device")
        asked = as_device(wanted) if wanted is not None and wanted.type == "cpu" and wanted.index is not None else None
        if name == "_to_copy" and asked is not None:
            return func(moved_to(args[0], asked, "to"), *args[1:], **(kwargs | {"device": None}))
        if name == "copy_" and device_of(args[0]) != device_of(args[1]) and not self._undecided(args):
            args = (args[0], moved_to(args[1], device_of(args[0]), "copy_"), *args[2:])
        place = self._common_place(name, func, args, kwargs)
        if asked is not None:
            place = asked.index
        result = func(*args, **(kwargs | {"device": torch.device("cpu")} if asked is not None else kwargs))
        for tensor in tensors_in(result):
            if place is not None and self.device_set.places.get(tensor) is None:
                self.device_set.places.set(tensor, place)
        return result

    def _undecided(self, values: Any) -> bool:
        return any(self.device_set.places.get(tensor) == UNDECIDED for tensor in tensors_in(values))

    def _common_place(self, name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int | None:
        """Where all inputs live; None for the host. Raises UsageError where they live on two places."""
        get = self.device_set.places.get
        every = list(tensors_in((args, kwargs)))
        if not every:
            return None if self.maker_is_user else UNDECIDED
        met = list(tensors_in((args[0], args[2:]))) if name in _INDEXING else every
        found: dict[int | None, None] = {}
        for tensor in met:
            place = get(tensor)
            if place == UNDECIDED or (place is None and tensor.dim() == 0):
                continue
            found[place] = None
        for tensor in tensors_in(written_arguments(func, args, kwargs)):
            place = get(tensor)
            if place != UNDECIDED:
                found[place] = None  # a 0-d tensor of the host too: what is written must be where the result is
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
                self.device_set.places.set(tensor, place)
        return place


_INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index", "_unsafe_index_put"}
"""Operators whose indices may be the host's, as in torch."""


def _words(place: int | None) -> str:
    return "the host, cpu" if place is None else f"cpu:{place}"


class _Functions(TorchFunctionMode):
    """Python's side: what torch decides by a device that it cannot tell apart, before an operator is called."""

    def __init__(self, rules: _Rules) -> None:
        super().__init__()
        self.rules = rules

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        rules = self.rules
        if rules.device_set.paused:
            return func(*args, **kwargs)
        special = _SPECIAL.get(func)
        if special is not None:
            return special(func, args, kwargs)
        before, get = rules.maker_is_user, rules.device_set.places.get
        rules.maker_is_user = all(get(tensor) is None for tensor in tensors_in((args, kwargs)))
        try:
            return func(*args, **kwargs)
        finally:
            rules.maker_is_user = before


def _device(func: Any, args: Any, kwargs: Any) -> torch.device:
    return device_of(args[0])


def _to(func: Any, args: Any, kwargs: Any) -> Any:
    """tensor.to(device, dtype), .to(other), .to(dtype) and their keywords."""
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
        rest.pop(0)  # Module.to gives a dtype of None
    elif rest and isinstance(rest[0], torch.dtype):
        kwargs["dtype"] = rest.pop(0)
    kwargs |= dict(zip(("non_blocking", "copy"), rest, strict=False))
    if asked is None:
        return func(tensor, **kwargs)
    if torch.device(asked).type != "cpu":
        return func(tensor, asked, **kwargs)
    target = as_device(asked)
    fresh = device_of(tensor) != target
    moved: Tensor = moved_to(tensor, target, "to") if fresh else tensor
    kwargs["copy"] = bool(kwargs.get("copy")) and not fresh
    return func(moved, **({"dtype": tensor.dtype} | kwargs))


def _cpu(func: Any, args: Any, kwargs: Any) -> Tensor:
    return moved_to(args[0], torch.device("cpu"), "to")


def _copy_(func: Any, args: Any, kwargs: Any) -> Tensor:
    kwargs = dict(kwargs)
    dst, src, *rest = args if len(args) > 1 else (*args, kwargs.pop("other"))
    if device_of(dst) != device_of(src):
        src = moved_to(src, device_of(dst), "copy_")
    written: Tensor = func(dst, src, *rest, **kwargs)
    return written


def _set_item(func: Any, args: Any, kwargs: Any) -> None:
    tensor, index, value = args
    if isinstance(value, Tensor) and device_of(value) != device_of(tensor):
        value = moved_to(value, device_of(tensor), "copy_")
    func(tensor, index, value)


def _made_from_values(func: Any, args: Any, kwargs: Any) -> Tensor:
    """torch.tensor and its like, whose device never reaches an operator."""
    asked = kwargs.get("device")
    if asked is None or torch.device(asked).type != "cpu":
        made: Tensor = func(*args, **kwargs)
        return made
    target = as_device(asked)
    made = func(*args, **(kwargs | {"device": None}))
    if device_of(made) == target:
        return made
    if args and made is args[0]:
        return moved_to(made, target, "to")
    if name_of(target) != HOST:
        DEVICE_SETS[-1].places.set(made, target.index)
    return made


def _host_only(func: Any, args: Any, kwargs: Any) -> Any:
    device = device_of(args[0])
    if name_of(device) != HOST:
        raise UsageError(f"a tensor of {name_of(device)} as a NumPy array: write mw.to(tensor, 'cpu') first.")
    return func(*args, **kwargs)


def _same_place(func: Any, args: Any, kwargs: Any) -> Tensor:
    device, copied = device_of(args[0]), func(*args, **kwargs)
    if name_of(device) != HOST:
        DEVICE_SETS[-1].places.set(copied, device.index)
    duplicate: Tensor = copied
    return duplicate


def _new_tensor(func: Any, args: Any, kwargs: Any) -> Tensor:
    """On the tensor's own device unless another is asked; its values never reach an operator."""
    return _made_from_values(func, args, {"device": device_of(args[0])} | kwargs)


_SPECIAL: dict[Any, Callable[[Any, Any, Any], Any]] = {
    torch.Tensor.device.__get__: _device,
    torch.Tensor.to: _to,
    torch.Tensor.cpu: _cpu,
    torch.Tensor.copy_: _copy_,
    torch.Tensor.__setitem__: _set_item,
    torch.Tensor.numpy: _host_only,
    torch.Tensor.__array__: _host_only,
    torch.Tensor.__deepcopy__: _same_place,
    torch.Tensor.new_tensor: _new_tensor,
    torch.tensor: _made_from_values,
    torch.as_tensor: _made_from_values,
    torch.asarray: _made_from_values,
}
