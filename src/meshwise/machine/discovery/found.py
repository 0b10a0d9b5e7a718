"""Hold what a driver reports of accelerators and their pairs.

Tested in tests/machine/test_discover.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

Sockets = Mapping[int | None, int | None]
"""The processor socket of each NUMA node, or None if unknown."""


@dataclass(frozen=True)
class Accelerator:
    """One accelerator as its driver reports it. Values that are unknown are None.

    pci: the PCI address as sysfs writes it.
    memory: in bytes.
    now: the current generation and lane count of the PCIe link, e.g. (4, 16).
    system: the highest generation and lane count that the card can reach in its slot.
    own: the highest generation and lane count that the card supports.
    sliced: whether MIG divides the accelerator.
    """

    name: str
    pci: str
    uuid: str = ""
    memory: int | None = None
    numa: int | None = None
    now: tuple[int | None, int | None] = (None, None)
    system: tuple[int | None, int | None] = (None, None)
    own: tuple[int | None, int | None] = (None, None)
    sliced: bool = False


@dataclass(frozen=True)
class Between:
    """The connection between two accelerators.

    links: the number of NVLinks. 0 means that there is only PCIe, None that the number is unknown.
    peer: whether the first accelerator can access the memory of the second.
    crosses: what the path crosses besides switches: `bridge`, `socket` or "".
    """

    links: int | None = None
    generation: int | None = None
    peer: bool | None = None
    crosses: str = ""


@dataclass(frozen=True)
class Found:
    """The accelerators, in the driver's order.

    between: the connection of each pair of accelerators, by their indices.
    """

    accelerators: tuple[Accelerator, ...] = ()
    between: Mapping[tuple[int, int], Between] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
