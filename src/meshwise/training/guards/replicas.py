"""Compare optimizer settings and sums of parameters between replicas.

A scheduler or the program sets an optimizer's settings on each rank. Gradients are reduced, so parameters diverge only
if a rank modifies them locally: with noise drawn on that rank, or by a rule that depends on its samples. The sums are
sent with the loss (agreed.py) at backward 2, 4, 8 … of each program.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, TypeAlias

import torch

from meshwise.spec.user_code import user_place
from meshwise.torch_compat.dispatch import rehearsing
from meshwise.torch_compat.reducer import versions
from meshwise.training.engine.engine import Engine
from meshwise.training.engine.loops import LoopRead
from meshwise.training.engine.program import Program

Settings: TypeAlias = tuple[tuple[str, str, Any], ...]
"""Tuples of (name of the value, description of the object that has it, value)."""
NAMES = {"lr": "lr", "momentum": "momentum", "betas": "betas", "weight_decay": "weight decay"}


def settings_differ(ranks: Sequence[Settings]) -> str:
    """Return a sentence on how a rank's settings differ from rank 0's settings, or ""."""
    for rank, settings in enumerate(ranks):
        if len(settings) != len(ranks[0]):  # a rank may still hold an optimizer that another has freed
            continue
        for mine, other in zip(ranks[0], settings, strict=True):
            if mine != other and mine[0] != PARAMETERS:
                return _DIFFER.format(rank=rank, name=mine[0], whose=mine[1], value=other[2], of_rank_0=mine[2])
    return ""


_DIFFER = (
    "rank {rank} has {name} {value}, rank 0 {of_rank_0} ({whose}): models would differ. Set it alike on all ranks, and "
    "pass the same number to schedulers: scheduler.step(mw.mean(loss)), or what mw.backward returns."
)
PARAMETERS = "sum of parameters"


def sums_of(program: Program) -> Settings:
    """Return the sum of all parameters' absolute values, to compare ranks. Empty if ranks hold parts of them."""
    if program.plan is None or program.plan.parameters_divided or rehearsing():
        return ()
    made = dict.fromkeys(p for model in program.models for p in model.parameters())  # including those made in a forward
    sums = [p.detach().abs().sum(dtype=torch.float64) for p in made]
    return ((PARAMETERS, "", float(torch.stack(sums).sum())),)


def _alike(one: float, other: float) -> bool:
    """Return whether two sums are equal, as far as devices round a step alike. NaN equals only NaN."""
    return math.isclose(one, other, rel_tol=1e-6) or (math.isnan(one) and math.isnan(other))


def diverged(ranks: Sequence[Settings]) -> str:
    """Return a sentence on how the ranks' parameters differ, or ""."""
    for rank, settings in enumerate(ranks):
        for (name, _, value), (_, _, of_rank_0) in zip(settings, ranks[0], strict=False):
            if name == PARAMETERS and not _alike(value, of_rank_0):
                sums = f"the sum of their absolute values is {value:.9g} on rank {rank} and {of_rank_0:.9g} on rank 0"
                return f"{user_place()}: {_DIVERGED.format(sums=sums)}"
    return ""


_DIVERGED = (
    "the ranks' parameters have diverged: {sums}. Between mw.backward and the next batch something changes parameters "
    "or gradients differently on each rank: random numbers, which each rank draws for itself in the loop over a "
    "loader, values of this rank's samples, loss.backward() instead of mw.backward(loss), or a forward that creates "
    "parameters. Create them before mw.distribute, and draw the same noise on every rank: "
    "torch.randn(p.shape, generator=g), where g is a torch.Generator with the same seed on every rank."
)

_BY_HAND = (
    "{place}: this loop changes parameters or their gradients, but never calls mw.backward, so each rank trains on the "
    "gradients of its own samples. Write mw.backward(loss) instead of loss.backward()."
)


class UpdatesByHand:
    """Warns of loops in a per-rank program that change parameters or gradients, but never call `mw.backward`."""

    def __init__(self, engine: Engine) -> None:
        self._program, self._say = engine.program, engine.notify
        self._before: dict[LoopRead, tuple[int, set[tuple[int, int]]]] = {}

    def _now(self) -> tuple[int, set[tuple[int, int]]]:
        """The backwards so far; each parameter and gradient with its version, which writes to `p.data` leave alone."""
        held = [t for p in self._program.named_parameters().values() for t in (p, p.grad) if t is not None]
        return self._program.backwards, set(zip(map(id, held), versions(held), strict=True))

    def batch_asked(self, loop: LoopRead) -> None:
        """Record the parameters' version counters as a loop begins."""
        self._before.setdefault(loop, self._now())

    def loop_ends(self, loop: LoopRead) -> None:
        """Compare the version counters as the loop ends."""
        (backwards, now), before = self._now(), self._before.pop(loop, None)
        if before is not None and before[0] == backwards and now - before[1]:
            self._say(_BY_HAND.format(place=loop.place))
