"""What this process has distributed so far, for a loop that is not ours: one value, `own`."""

from __future__ import annotations

import contextlib
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from meshwise.parallel.apply import Applied
from meshwise.spec.plan import Plan
from meshwise.spec.world import World
from meshwise.training.order import BatchSlice
from meshwise.training.own_spans import OwnSpans
from meshwise.training.recording import Recording
from meshwise.workers.join import rank_context


class Observer(Protocol):
    """Who looks on while a script runs (`meshwise check`), and ends it. Called on every rank, in the same order."""

    folder: Path
    """Where what the script saves goes instead: a check writes over nobody's files."""

    def planned(self, plan: Plan, world: World) -> Plan:
        """The plan that is carried out in the place of `plan`."""

    def begins(self) -> None:
        """A loop over a distributed loader begins."""

    def asked(self) -> None:
        """It asks for its next batch."""

    def most(self, batch_size: int) -> int | None:
        """How many samples that may have; 0 ends the loop, None leaves it as it is."""

    def given(self, share: BatchSlice) -> None:
        """It has its batch."""

    def left(self) -> None:
        """It is over, or was left."""

    def backward(self, reduce: bool) -> contextlib.AbstractContextManager[None]:
        """Around `mw.backward`; reduce: whether it leaves reduced gradients."""

    def lost(self, loss: Tensor) -> None:
        """The global loss that it returns."""

    def steps(self, optimizer: Optimizer) -> None:
        """An optimizer begins its step; gradients are reduced."""

    def stepped(self, optimizer: Optimizer) -> None:
        """It has made its step."""

    def summed(self, value: Tensor | float) -> None:
        """What `mw.sum` gives."""


@dataclass
class Own:
    """What this process has distributed so far."""

    plan: Plan | None = None
    """The plan of the script, once it is known."""
    applied: Applied | None = None
    """What it has made of all models; None where there is nothing to do."""
    models: nn.ModuleList = field(default_factory=nn.ModuleList)
    optimizers: list[Optimizer] = field(default_factory=list)
    """Those that were given."""
    bound: set[int] = field(default_factory=set)
    """Ids of the optimizers that were laid as the plan says."""
    replaced: WeakIdKeyDictionary = field(default_factory=WeakIdKeyDictionary)
    """Names of the parameters that the models had before the plan replaced them."""
    share: BatchSlice | None = None
    """Of the batch that a distributed loader gave last, while its loop is running."""
    used_stand_ins: bool = False
    """Whether the loop that ended last gave some rank a stand-in."""
    reduce: bool = True
    backwards: int = 0
    stepped: set[int] = field(default_factory=set)
    """Ids of the optimizers that stepped since the last backward."""
    stepping: set[int] = field(default_factory=set)
    """Ids of those inside their step: one that calls `super().step()` is asked twice."""
    spans: OwnSpans = field(default_factory=OwnSpans)
    recording: Recording | None = None
    saves: dict[str, int] = field(default_factory=dict)
    loads: int = 0
    said: set[str] = field(default_factory=set)
    observer: Observer | None = None


own = Own()


def say(text: str) -> None:
    """A line for the user, once a run."""
    session = rank_context()
    if session.world.rank != 0 or text in own.said:
        return
    own.said.add(text)
    if session.channel is not None:
        session.channel.send("say", text=text)
    else:
        print(text, file=sys.stderr, flush=True)
