"""Hold what drivers report of accelerators and their pairs, for any vendor.

Tested in tests/machine/test_discover.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

Sockets = Mapping[int | None, int | None]
"""The socket of each NUMA node; an unknown node (None) has none."""


@dataclass(frozen=True)
class Accelerator:
    """One accelerator as its driver reports it. memory in bytes; pci as sysfs writes addresses.

    now: (generation, lanes) of its PCIe link at this moment. system: the maximum of card and slot together. own: the
    maximum of the card alone. Each None if unknown.
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
    """The connection of two accelerators. links: NVLinks or xGMI links, 0: PCIe only, None: unknown. peer: whether one
    may read the other's memory. crosses: `` (only switches), `bridge`, `socket`."""

    links: int | None = None
    generation: int | None = None
    peer: bool | None = None
    crosses: str = ""


@dataclass(frozen=True)
class Found:
    """All accelerators of one driver, in its order, and each pair of them by position in that order."""

    accelerators: tuple[Accelerator, ...] = ()
    between: Mapping[tuple[int, int], Between] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
