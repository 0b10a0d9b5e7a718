"""Trace few blocks to know what one costs on a rank.

One trace is enough for each combination of `tensor`, `sequence` and `recompute`. The costs of deeper models, of more
samples and of other sizes of the `tensor` axis are computed from it.

Tested in tests/rehearsal/test_likely.py.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace

from meshwise.rehearsal.from_few import Tracer
from meshwise.rehearsal.prices import Prices
from meshwise.rehearsal.shorter import shortened
from meshwise.rehearsal.trace import trace
from meshwise.rehearsal.work import Allocate, CollectiveOperation, Free, Launch
from meshwise.spec.errors import MeshwiseError
from meshwise.spec.machine import Machine
from meshwise.spec.plan import Plan

BLOCKS = 3
"""How many groups of blocks are traced to know the cost of a block. A group is often a single block."""


@dataclass(frozen=True)
class Kind:
    """The settings for tracing a model with only a few blocks on one rank, in a step with one microbatch.

    tensor: the size of the axis `tensor`.
    rows: the number of samples in the microbatch.
    """

    precision: str
    tensor: int = 1
    sequence: bool = False
    recompute: str = "none"
    rows: int = 1


@dataclass(frozen=True)
class Small:
    """Costs on one rank, computed from a trace of a few blocks. All except `kept` are in seconds.

    forward, backward: the forward and backward of one block, without collectives.
    outside: the operators of a microbatch that are in no block, without collectives.
    sent: all collectives of one block, in its forward and backward together.
    kept: the bytes that a block keeps for its backward.
    """

    forward: float
    backward: float
    outside: float
    sent: float
    kept: float


def small_traces(program: Tracer, machine: Machine) -> Callable[[Kind], Small | None]:
    """Return a function that finds out what a block of the model costs, from a trace of a few blocks.

    The returned function takes the settings of the trace. It returns None if the model cannot be shortened to a few
    blocks, or if a cost is unknown.
    """
    prices = Prices(machine)

    def small(kind: Kind) -> Small | None:
        try:
            stretch = program.model.stretch
            if stretch is None or stretch.count <= BLOCKS or kind.tensor > len(machine.devices):
                return None
            job = replace(shortened(program.job, stretch, BLOCKS), batch_size=kind.rows)
            plan = Plan(precision=kind.precision, tensor=kind.tensor, sequence=kind.sequence, recompute=kind.recompute)
            (traced,) = trace(job, plan)
        except MeshwiseError:
            return None
        first, blocks = stretch.start, BLOCKS * stretch.group
        names = tuple(f"{name}." for name in stretch.names[first : first + blocks])
        seconds, kept = defaultdict[object, float](float), dict[int, int]()
        taken: list[Allocate] = []  # for the next launch
        back = False
        for event in traced.step.events:
            if isinstance(event, Allocate):
                taken.append(event)
            elif isinstance(event, Free) and not back:
                kept.pop(event.storage, None)
            elif isinstance(event, Launch) and event.phase in ("forward", "backward"):
                inside, back = f"{event.module}.".startswith(names), back or event.phase == "backward"
                if (price := prices.of(event.what, 0)) is None:
                    return None
                sent = isinstance(event.what, CollectiveOperation)
                seconds[inside, "sent" if sent else event.phase] += price.seconds
                if inside and not back:
                    kept.update((one.storage, one.size) for one in taken)
                taken.clear()
        forward, backward, between = (seconds[True, name] / blocks for name in ("forward", "backward", "sent"))
        outside = seconds[False, "forward"] + seconds[False, "backward"]
        return Small(forward, backward, outside, between, sum(kept.values()) / blocks)

    return small
