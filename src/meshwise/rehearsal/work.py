"""Define the work of one rank in a step, free of hardware.

It is traced once, and priced on many machines.

Tested in tests/rehearsal/test_work.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

MAIN = "main"
"""The stream in which a program computes."""
PHASES = ("forward", "backward", "optimizer", "other")
CATEGORIES = ("parameters", "buffers", "gradients", "optimizer", "activations", "temporary", "communication", "input")
"""What memory is for. `communication`: buffers of collectives, and what is gathered of sharded parameters."""


@dataclass(frozen=True, slots=True)
class Operation:
    """One operator on one device.

    name: torch's, without its overload: `aten.mm`. shapes and dtypes (`bf16`): of its tensor arguments, in their order.
    flops: multiplications and additions, of a causal attention those that are done; read and written: bytes. call: how
    it was called, of a CPU's operators (calls.py), so that it can be measured. layout: `channels_last` where images are
    so.
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
    """One collective, send or receive. kind: `all-reduce`, `all-gather`, `reduce-scatter`, `all-to-all`, `broadcast`,
    `send`, `receive`. size: bytes of the full tensor, as nccl-tests count them. ranks: of the group, as the whole run
    counts them; of a send (from, to), of a receive (from, to)."""

    kind: str
    size: int
    ranks: tuple[int, ...]
    dtype: str = ""


@dataclass(frozen=True, slots=True)
class Copy:
    """Bytes between the memory of the host and that of the device. to: `host` or `device`."""

    size: int
    to: str


@dataclass(frozen=True, slots=True)
class Launch:
    """The host begins something on a stream. Streams do one thing after the other.

    after: places in `Work.events` of launches of other streams that must have ended before. blocks: the host itself
    goes on only when it has ended. module: the block of the model; microbatch: counted from 0, -1 outside of one.
    """

    what: Operation | CollectiveOperation | Copy
    stream: str = MAIN
    phase: str = "other"
    module: str = ""
    microbatch: int = -1
    after: tuple[int, ...] = ()
    blocks: bool = False


@dataclass(frozen=True, slots=True)
class Allocate:
    """Memory is taken. storage: its number, for `Free`. category: of `CATEGORIES`. on_host: in the host's memory."""

    storage: int
    size: int
    category: str
    on_host: bool = False
    stream: str = MAIN


@dataclass(frozen=True, slots=True)
class Free:
    """Memory is given back."""

    storage: int


Event = Launch | Allocate | Free


@dataclass(frozen=True)
class Work:
    """What one rank does in one step, in the order in which its host does it.

    kind: of device that was rehearsed: `cpu`, or `gpu` for any accelerator. held: what is allocated when the step
    begins (parameters, state of the optimizer). notes: what the plan said of the program. dtensors: the optimizer steps
    on DTensors, whose every operator goes through Python.
    """

    rank: int
    ranks: int
    kind: str
    held: tuple[Allocate, ...]
    events: tuple[Event, ...]
    notes: tuple[str, ...] = ()
    dtensors: bool = False

    @property
    def launches(self) -> Iterator[Launch]:
        """What is begun, without what memory it takes."""
        return (event for event in self.events if isinstance(event, Launch))

    @property
    def flops(self) -> int:
        """Of all operators."""
        return sum(launch.what.flops for launch in self.launches if isinstance(launch.what, Operation))
