"""Hold what drivers report of accelerators and their pairs, for any vendor.

Tested in tests/machine/test_discover.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

Sockets = Mapping[int | None, int | None]
"""The processor socket of each NUMA node; None if unknown."""


@dataclass(frozen=True)
class Accelerator:
    """One accelerator as its driver reports it. memory in bytes; pci: its address as sysfs writes it.

    now: (generation, lanes) of its PCIe link at this moment. system: the maximum of card and slot together. own: the
    maximum of the card alone. None for what is unknown. sliced: it is divided by MIG.
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
    vendor: str = "nvidia"


@dataclass(frozen=True)
class Between:
    """The connection of two accelerators. links: number of NVLinks or xGMI links; 0: only PCIe; None: unknown. peer:
    whether one can access the memory of the other. crosses: empty (only switches), `bridge` or `socket`."""

    links: int | None = None
    generation: int | None = None
    peer: bool | None = None
    crosses: str = ""


@dataclass(frozen=True)
class Found:
    """The accelerators of one vendor, in the driver's order. between: the connection of each pair, by their indices."""

    accelerators: tuple[Accelerator, ...] = ()
    between: Mapping[tuple[int, int], Between] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
