"""Tell an outside watcher, such as `meshwise check`, what an engine does."""

from __future__ import annotations

import contextlib
from typing import Any, Protocol

from torch import Tensor
from torch.optim import Optimizer

from meshwise.data.order import BatchSlice
from meshwise.spec.plan import Plan
from meshwise.spec.world import World


class Watcher(Protocol):
    """Who watches an engine from outside (`meshwise check`). Called on every rank, in the same order."""

    def choose_plan(self, plan: Plan, world: World) -> Plan:
        """The plan that is applied in the place of `plan`."""

    def loop_begins(self) -> None:
        """A loop over batches begins."""

    def batch_asked(self) -> None:
        """It asks for its next batch."""

    def batch_limit(self, batch_size: int) -> int | None:
        """How many samples that may have; 0 ends the loop, None leaves it as it is."""

    def batch_given(self, part: BatchSlice, batch: Any, *, loader: Any = None, split: bool = False) -> None:
        """A microbatch begins: its forward comes. loader: the user's, of a script. split: it is of `mw.split`."""

    def in_stage(self, stage: int, microbatch: int) -> None:
        """The coming forward or backward is that of a microbatch in a stage of a pipeline."""

    def forward_ends(self) -> None:
        """The forward in a stage is over; its backward comes later, maybe after other forwards."""

    def loop_ends(self) -> None:
        """It is over, or was left."""

    def backward(self, reduce: bool) -> contextlib.AbstractContextManager[None]:
        """Around the backward of a microbatch; reduce: whether it leaves reduced gradients."""

    def loss_known(self, loss: Tensor, scale: float = 1.0) -> None:
        """The global loss of the backwards since the last one that reduced. scale: of a job's loss scaler, which
        is in the gradients still."""

    def step_begins(self, optimizer: Optimizer) -> None:
        """An optimizer begins its step; gradients are reduced."""

    def step_ends(self, optimizer: Optimizer) -> None:
        """It has made its step."""

    def summed(self, value: Tensor | float) -> None:
        """What `mw.sum` gives."""

    def shown(self, where: str, text: str) -> None:
        """What `mw.print` or `mw.log` shows of the program, at a line of it."""
