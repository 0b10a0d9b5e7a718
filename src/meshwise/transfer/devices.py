"""Name a tensor's place: a real device, host, or virtual device.

A virtual device is a number that is recorded for the storage of a tensor in host memory. While virtual devices are open
(see `meshwise.transfer.virtual`), `cpu:1` therefore counts as a device of its own. Plain `cpu` is the host.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import lru_cache

import torch
from torch import Tensor

from meshwise.spec.devices import has_streams
from meshwise.spec.errors import UsageError
from meshwise.spec.machine import HOST
from meshwise.torch_compat.dispatch import StorageMap

UNDECIDED = -1
"""The device number of a tensor that was made without a device. It gets the device of the first tensor used with it."""

Hook = Callable[[Tensor, Tensor, str], object]
"""A function `hook(dst, src, path)` that is called after a copy and before the copy is verified."""


class VirtualDevices(list[torch.device]):
    """The virtual devices of a `with` block. `devices[1]` is the device `cpu:1`.

    places: the device number of each tensor's storage.
    paused: True while operators treat tensors of virtual devices as ordinary CPU tensors.
    """

    paused = False
    on_copy: Hook | None = None
    """Called as `on_copy(dst, src, path)` at each copy between two devices, before the copy is verified.

    The hook may count, wait, or write into `dst`. Inside the hook, operators ignore virtual devices.
    """

    def __init__(self, devices: Iterable[torch.device]) -> None:
        super().__init__(devices)
        self.places = StorageMap()

    @contextmanager
    def quiet(self) -> Iterator[None]:
        """Let operators treat tensors of virtual devices as ordinary CPU tensors inside the `with` block.

        This is needed to copy from one virtual device to another, and to check the result.
        """
        before, self.paused = self.paused, True
        try:
            yield
        finally:
            self.paused = before


OPEN_DEVICES: list[VirtualDevices] = []
"""The open virtual devices. The list is empty or has one item."""


def open_devices() -> VirtualDevices | None:
    """Return the open virtual devices. None if none are open."""
    return OPEN_DEVICES[-1] if OPEN_DEVICES else None


def plainly() -> AbstractContextManager[None]:
    """Return a context manager inside which operators ignore virtual devices, if any are open."""
    return OPEN_DEVICES[-1].quiet() if OPEN_DEVICES else nullcontext()


def device_of(tensor: Tensor) -> torch.device:
    """Return the device of a tensor: `cuda:0`, a virtual device such as `cpu:1`, or `cpu` for host memory."""
    if not OPEN_DEVICES:
        return tensor.device
    with OPEN_DEVICES[-1].quiet():
        device = tensor.device
        place = OPEN_DEVICES[-1].places.get(tensor) if device.type == "cpu" else None
    return device if place is None or place == UNDECIDED else torch.device("cpu", place)


@lru_cache(maxsize=1024)
def name_of(device: torch.device) -> str:
    """Return the name that the device has in the links of a machine: `host`, `cuda:0`, `cpu:1`."""
    return HOST if str(device) == "cpu" else str(device)


def as_device(word: str | torch.device | int) -> torch.device:
    """Convert a device or its name to a torch device. `cuda` means the current CUDA device, and `cpu` the host.

    Raises UsageError if the device does not exist.
    """
    try:
        device = torch.device(word)
    except (RuntimeError, TypeError, ValueError) as error:
        raise UsageError(f"device {word!r} is not known. Write cpu, cuda:0, or cpu:1 for a virtual device.") from error
    if device.type == "cpu":
        return _host_or_virtual(device)
    if has_streams(device):
        known = torch.get_device_module(device)
        count = known.device_count()
        index = known.current_device() if str(device) == device.type and count else device.index or 0
        if index >= count:
            kinds = f"{device.type.upper()} devices"
            raise UsageError(f"device {word}: torch finds only {count} {kinds}. Run `meshwise devices` for a list.")
        return torch.device(device.type, index)
    kind = torch.accelerator.current_accelerator()
    if kind is None or kind.type != device.type:
        raise UsageError(f"device {word}: torch finds no such device. Run `meshwise devices` for a list of devices.")
    return device


def _host_or_virtual(device: torch.device) -> torch.device:
    index: int | None = device.index  # torch's type annotation lacks None
    open_one = open_devices()
    if open_one is None:
        if index:
            raise UsageError(f"device {device} is virtual, but is not open. Call mw.virtual_devices({index + 1}).")
        return torch.device("cpu")
    if index is not None and index >= len(open_one):
        raise UsageError(f"device {device} is not open. Virtual devices: cpu:0 to {open_one[-1]}. cpu is the host.")
    return device


def empty_like(tensor: Tensor, device: torch.device) -> Tensor:
    """Allocate memory on `device` for a copy of `tensor`, with the same shape and dtype.

    If `tensor` is dense, the new memory has the same strides, too.
    """
    open_one = open_devices()
    if open_one is None or device.type != "cpu":
        return torch.empty_like(tensor, device=device, requires_grad=False)
    with open_one.quiet():
        made = torch.empty_like(tensor, device="cpu", requires_grad=False)
        if device.index is not None:
            open_one.places.set(made, device.index)
    return made
