"""Small traces: what a block takes on one rank, of a step of few blocks and one or two samples.

Of each kind of `tensor`, `sequence` and `recompute` one is enough: deeper models, more samples and other parts of a
layer follow from them.

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
from meshwise.rehearsal.work import CollectiveOperation
from meshwise.spec.errors import MeshwiseError
from meshwise.spec.machine import Machine
from meshwise.spec.plan import Plan

BLOCKS = 3
"""Groups of them: in the middle one of these nothing is special."""


@dataclass(frozen=True)
class Kind:
    """Of a small trace: parts of a layer, and samples of its one microbatch."""

    precision: str
    tensor: int = 1
    sequence: bool = False
    recompute: str = "none"
    rows: int = 1


@dataclass(frozen=True)
class Small:
    """Seconds on one rank. forward, backward: of a block; sent: of its collectives, in both. outside: of all else in a
    microbatch, without what it sends."""

    forward: float
    backward: float
    outside: float
    sent: float


def small_traces(program: Tracer, machine: Machine) -> Callable[[Kind], Small | None]:
    """What makes them. It gives None for a model without alike blocks, and where a price is not known."""
    prices = Prices(machine)

    def small(kind: Kind) -> Small | None:
        try:
            stretch = program.model.stretch
            if stretch is None or stretch.count <= BLOCKS or kind.tensor > len(machine.devices):
                return None
            job = replace(shortened(program.job, stretch, BLOCKS), batch_size=kind.rows)
            plan = Plan(
                precision=kind.precision, tensor=kind.tensor, sequence=kind.sequence, recompute=kind.recompute
            )
            (traced,) = trace(job, plan)
        except MeshwiseError:
            return None
        first, blocks = stretch.start, BLOCKS * stretch.group
        inside = tuple(f"{name}." for name in stretch.names[first : first + blocks])
        seconds: dict[object, float] = defaultdict(float)
        for launch in traced.step.launches:
            if launch.phase not in ("forward", "backward"):
                continue
            if (price := prices.of(launch.what, 0)) is None:
                return None
            sent = isinstance(launch.what, CollectiveOperation)
            seconds[f"{launch.module}.".startswith(inside), "sent" if sent else launch.phase] += price.seconds
        forward, backward, between = (seconds[True, name] / blocks for name in ("forward", "backward", "sent"))
        return Small(forward, backward, seconds[False, "forward"] + seconds[False, "backward"], between)

    return small
