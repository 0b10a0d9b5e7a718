"""Hold what drivers report of accelerators and their pairs, for any vendor.

Tested in tests/machine/test_discover.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

Sockets = Mapping[int | None, int | None]
"""The socket of each NUMA node; a node that is not known (None) has none."""


@dataclass(frozen=True)
class Accelerator:
    """One accelerator as its driver reports it. memory in bytes; pci as sysfs writes addresses.

    now: (generation, lanes) of its PCIe link at this moment. system: the most that card and slot together can do.
    own: the most that the card alone could do. Each None where it is not known.
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
    """What joins two accelerators. links: NVLinks or xGMI links, 0: PCIe only, None: not known. peer: may one read the
    other's memory. crosses: `` (nothing but a switch), `bridge`, `socket`."""

    links: int | None = None
    generation: int | None = None
    peer: bool | None = None
    crosses: str = ""


@dataclass(frozen=True)
class Found:
    """All accelerators of one driver, in its order, and each pair of them by their places in that order."""

    accelerators: tuple[Accelerator, ...] = ()
    between: Mapping[tuple[int, int], Between] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
