"""Find which accelerators the environment shows this process, in order.

The variable is CUDA_VISIBLE_DEVICES.

Tested in tests/machine/test_discover_odd.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from meshwise.machine.discovery.found import Accelerator, Found

VISIBLE = "CUDA_VISIBLE_DEVICES"


def visible(found: Found, environ: Mapping[str, str]) -> Found:
    """Select the accelerators that environment variables such as CUDA_VISIBLE_DEVICES leave visible to this process.
    They are returned in the order of the variable.

    As in CUDA, an entry of the variable that names no device ends the list (CUDA programming guide, environment
    variables). CUDA numbers the fastest device first, unless CUDA_DEVICE_ORDER is PCI_BUS_ID. This function always
    numbers devices by PCI address. If the NVIDIA devices have different names, torch may number them differently, and a
    warning says so.
    """
    devices = found.accelerators
    order = list(range(len(devices)))
    notes = []
    if devices and VISIBLE in environ:
        order = _chosen(environ[VISIBLE], devices)
        if len(order) < len(devices):
            notes.append(
                f"{VISIBLE}={environ[VISIBLE]}: this process can use only {len(order)} of {len(devices)} devices."
            )
    if len({device.name for device in devices}) > 1 and environ.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID":
        notes.append(
            "The devices differ. CUDA numbers the fastest device first, but without torch, this list is in the order "
            "of PCI addresses. Set CUDA_DEVICE_ORDER=PCI_BUS_ID to make both the same."
        )
    return kept(replace(found, warnings=(*found.warnings, *notes)), order)


def kept(found: Found, order: list[int]) -> Found:
    """Keep only the accelerators at the indices `order`, in that order."""
    places = {old: new for new, old in enumerate(order)}
    return replace(
        found,
        accelerators=tuple(found.accelerators[at] for at in order),
        between={
            (places[one], places[other]): between
            for (one, other), between in found.between.items()
            if one in places and other in places
        },
    )


def _chosen(text: str, devices: tuple[Accelerator, ...]) -> list[int]:
    chosen: list[int] = []
    for word in text.split(","):
        word = word.strip()
        if word.isdecimal() and int(word) < len(devices):
            chosen.append(int(word))
        elif word.startswith(("GPU-", "MIG-")) and (at := _by_uuid(word, devices)) is not None:
            chosen.append(at)
        else:
            break
    return list(dict.fromkeys(chosen))


def _by_uuid(word: str, devices: tuple[Accelerator, ...]) -> int | None:
    """Return the index in `devices` of the only device whose UUID begins with `word`. Return None if several devices
    match, or none. CUDA finds devices in the same way.

    word: the beginning of a UUID. For a MIG slice in the form `MIG-GPU-.../1/0`, the device that contains the slice is
        found. The form `MIG-...` does not contain the UUID of a device, so it is not found.
    """
    start = word.removeprefix("MIG-").split("/")[0]
    matching = [at for at, device in enumerate(devices) if device.uuid.startswith(start)]
    return matching[0] if len(matching) == 1 else None
