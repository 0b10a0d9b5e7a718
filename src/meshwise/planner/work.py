"""Define the work of one rank in a step, independent of hardware.

The work is traced once, and priced on many machines.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

MAIN = "main"
"""The name of the stream in which a program computes."""
PHASES = ("forward", "backward", "optimizer", "other")
CATEGORIES = ("parameters", "buffers", "gradients", "optimizer", "activations", "temporary", "communication", "input")
"""What memory is used for. `communication` stands for buffers of collectives and for gathered parameters."""


@dataclass(frozen=True, slots=True)
class Operation:
    """A call of an operator on one device."""

    name: str
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    flops: int
    read: int
    written: int
    call: str = ""
    layout: str = ""


@dataclass(frozen=True, slots=True)
class CollectiveOperation:
    """A collective, or a send or receive."""

    kind: str
    size: int
    ranks: tuple[int, ...]
    dtype: str = ""


@dataclass(frozen=True, slots=True)
class Copy:
    """A copy between host memory and device memory."""

    size: int
    to: str


What = Operation | CollectiveOperation | Copy


@dataclass(frozen=True, slots=True)
class Launch:
    """An operator, collective or copy that the host launches on a stream. A stream runs one launch after the other."""

    what: What
    stream: str = MAIN
    phase: str = "other"
    module: str = ""
    microbatch: int = -1
    after: tuple[int, ...] = ()
    blocks: bool = False


@dataclass(frozen=True, slots=True)
class Allocate:
    """The event that memory is allocated."""

    storage: int
    size: int
    category: str
    on_host: bool = False
    stream: str = MAIN


@dataclass(frozen=True, slots=True)
class Free:
    """The event that the memory of a storage is freed."""

    storage: int


@dataclass(frozen=True, slots=True)
class Mark:
    """Where a piece of a step begins, in traces that are to be composed (repeat_microbatches.py)."""

    piece: str
    number: int = -1


Event = Launch | Allocate | Free


@dataclass(frozen=True)
class Work:
    """What one rank does in one step."""

    rank: int
    ranks: int
    kind: str
    held: tuple[Allocate, ...]
    events: tuple[Event, ...]
    notes: tuple[str, ...] = ()
    dtensors: bool = False
    left_out: range = range(0)

    @property
    def launches(self) -> Iterator[Launch]:
        """The launches, without the memory events."""
        return (event for event in self.events if isinstance(event, Launch))

    def holds(self, category: str) -> int:
        """Return the bytes of a category that are allocated when the step begins."""
        return sum(each.size for each in self.held if each.category == category)

    @property
    def flops(self) -> int:
        """The FLOPs of all operators."""
        return sum(self._by_dtype.values())

    @property
    def dtype(self) -> str:
        """The dtype in which most FLOPs are computed. An empty string if the step has no FLOPs."""
        return max(flops, key=flops.__getitem__) if (flops := self._by_dtype) else ""

    @property
    def _by_dtype(self) -> Counter[str]:
        found = Counter[str]()
        for launch in self.launches:
            if isinstance(launch.what, Operation) and launch.what.flops:
                found[launch.what.dtypes[0]] += launch.what.flops
        return found
