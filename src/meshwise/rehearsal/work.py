"""Define the work of one rank in a step, independent of hardware.

The work is traced once, and priced on many machines.

Tested in tests/rehearsal/test_work.py.
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
    """A call of an operator on one device.

    name: the name in torch without the overload, such as `aten.mm`.
    shapes, dtypes: the shapes and dtypes of the tensor arguments, in order. A dtype is written like `bf16`.
    flops: the number of floating-point operations. Causal attention counts half as many as full attention.
    read, written: the bytes that the operator reads and writes.
    call: on a CPU, the call as text (timing.py), so that it can be measured.
    layout: `channels_last` if the images of a convolution have this layout.
    """

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
    """A collective, or a send or receive.

    kind: `all-reduce`, `all-gather`, `reduce-scatter`, `all-to-all`, `broadcast`, `send` or `receive`.
    size: the bytes of the full tensor, as nccl-tests count them.
    ranks: the global ranks of the group. For a send or receive, (source, target).
    """

    kind: str
    size: int
    ranks: tuple[int, ...]
    dtype: str = ""


@dataclass(frozen=True, slots=True)
class Copy:
    """A copy between host memory and device memory.

    size: the number of bytes.
    to: `host` or `device`.
    """

    size: int
    to: str


What = Operation | CollectiveOperation | Copy


@dataclass(frozen=True, slots=True)
class Launch:
    """An operator, collective or copy that the host launches on a stream. A stream runs one launch after the other.

    after: indices in `Work.events` of launches on other streams that must end before this one begins.
    blocks: whether the host waits until the launch has ended.
    module: the name of the model's block that the launch belongs to.
    microbatch: the index of the microbatch, from 0. It is -1 outside of microbatches.
    """

    what: What
    stream: str = MAIN
    phase: str = "other"
    module: str = ""
    microbatch: int = -1
    after: tuple[int, ...] = ()
    blocks: bool = False


@dataclass(frozen=True, slots=True)
class Allocate:
    """The event that memory is allocated.

    storage: the number of the storage. The event `Free` names the storage by the same number.
    category: one of CATEGORIES.
    on_host: whether it is in host memory.
    """

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
    """Where a piece of a step begins, in traces that are to be composed (repeat_microbatches.py).

    piece: `input`, `forward` or `backward` of microbatch `number`, or `rest`.
    """

    piece: str
    number: int = -1


Event = Launch | Allocate | Free


@dataclass(frozen=True)
class Work:
    """What one rank does in one step.

    rank, ranks: the rank, and the number of ranks.
    kind: the kind of device: `cpu`, or `gpu` for any accelerator.
    held: the memory that is already allocated when the step begins, such as parameters and optimizer state.
    events: launches and memory events, in the order in which the rank's host causes them.
    notes: remarks on the program under this plan.
    dtensors: whether the optimizer steps on DTensors. Operators on DTensors are slower, because each call goes through
        Python.
    left_out: microbatches whose forwards and backwards are not among `events`, but for the memory that they leave
        allocated. They do the same as those beside them.
    """

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
