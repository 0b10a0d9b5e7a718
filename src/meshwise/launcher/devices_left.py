"""Choose the devices of this machine that a restart uses.

A device that is gone, or on which ranks twice died before their first step, is left out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from meshwise.hardware.discovery.sysfs import is_there
from meshwise.hardware.find import pci_address
from meshwise.spec.devices import WorkerSlot
from meshwise.spec.faults import Fault
from meshwise.workers.failure import Failure

EARLY_DEATHS, NEVER = 2, 1 << 30


class DevicesLeft:
    """The worker slots of this machine, and whether each may still be used. A slot stands for a worker and its device.
    `used` holds the slots of the running attempt."""

    def __init__(self, slots: Sequence[WorkerSlot], sys: Path = Path("/sys")) -> None:
        self._slots, self._sys = list(slots), sys
        # Some containers and virtual machines list no devices. Without an address, a device never counts as gone.
        self._addresses = [pci if is_there(sys, pci) else "" for pci in (pci_address(slot.name) for slot in slots)]
        self._used = self._left = list(range(len(slots)))
        self._early: Counter[int] = Counter()
        self._back: dict[int, int] = {}  # maps a slot to the first attempt that may use it again

    @property
    def used(self) -> list[WorkerSlot]:
        chosen = [self._slots[at] for at in self._used]
        every = tuple(slot.index for slot in chosen if slot.index is not None)
        return [replace(slot, sees=every) if slot.sees else slot for slot in chosen]

    def failed(self, failure: Failure | None, attempt: int, happened: Iterable[Fault]) -> None:
        """Record that a worker failed, so that its device may be left out of the next attempts."""
        if failure is None or failure.rank >= len(self._used):
            return
        slot = self._used[failure.rank]
        for fault in happened:
            if fault.kind == "lost" and fault.rank == failure.rank:
                self._back[slot] = attempt + 1 + fault.back if fault.back else NEVER
        if failure.step is None and failure.kind in ("killed", "left", "hung"):
            self._early[slot] += 1
            if self._early[slot] == EARLY_DEATHS:
                self._back[slot] = NEVER

    def left(self, attempt: int) -> int:
        """Return how many devices attempt number `attempt` may use."""
        pairs = enumerate(self._addresses)
        self._left = [at for at, pci in pairs if self._back.get(at, 0) <= attempt and is_there(self._sys, pci)]
        return len(self._left)

    def use(self, count: int) -> None:
        """Use the first `count` of the devices that the last call of `left` counted."""
        self._used = self._left[:count]
