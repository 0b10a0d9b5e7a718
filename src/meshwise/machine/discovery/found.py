"""Hold what a driver reports of accelerators and their pairs.

Tested in tests/machine/test_discover.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from meshwise.machine.catalog import CatalogPart, part_of_driver_name

Sockets = Mapping[int | None, int | None]
"""The processor socket of each NUMA node, or None if unknown."""


@dataclass(frozen=True)
class Accelerator:
    """One accelerator as its driver or torch reports it. Values that are unknown are None.

    name: the driver's name of the model.
    pci: the PCI address as sysfs writes it.
    memory: in bytes. `told_by` says who reports it.
    now: the current generation and lane count of the PCIe link, e.g. (4, 16).
    own: the highest generation and lane count that the card supports.
    label: its name in the result, such as `cuda:0`. Empty if torch was not asked, until it is numbered.
    listed: whether the driver lists it. Otherwise torch alone sees it.
    """

    name: str
    pci: str
    memory: int | None = None
    numa: int | None = None
    now: tuple[int | None, int | None] = (None, None)
    own: tuple[int | None, int | None] = (None, None)
    told_by: str = "as the driver reports it"
    label: str = ""
    listed: bool = True

    @property
    def part(self) -> CatalogPart | None:
        """The device model in the catalog, or None if the catalog does not have it."""
        return part_of_driver_name(self.name, self.memory)


@dataclass(frozen=True)
class Between:
    """The connection between two accelerators.

    links: the number of NVLinks. 0 means that there is only PCIe, None that nothing is known.
    peer: whether the first accelerator can access the memory of the second.
    crosses: what the path crosses besides switches: `bridge`, `socket` or "".
    """

    links: int | None = None
    generation: int | None = None
    peer: bool | None = None
    crosses: str = ""


@dataclass(frozen=True)
class Found:
    """The accelerators, in the order of who reports them.

    between: the connection of each pair of accelerators, by their indices.
    """

    accelerators: tuple[Accelerator, ...] = ()
    between: Mapping[tuple[int, int], Between] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
