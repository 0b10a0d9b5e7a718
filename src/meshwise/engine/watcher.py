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
    """Watches an engine from outside (`meshwise check`). Called on every rank, in the same order."""

    def choose_plan(self, plan: Plan, world: World) -> Plan:
        """Return the plan to apply instead of `plan`."""

    def loop_begins(self) -> None:
        """Note that a loop over batches begins."""

    def batch_asked(self) -> None:
        """Note that the loop asks for its next batch."""

    def batch_limit(self, batch_size: int) -> int | None:
        """Return how many samples that batch may have; 0 ends the loop, None sets no limit."""

    def batch_given(self, part: BatchSlice, batch: Any, *, loader: Any = None, split: bool = False) -> None:
        """Note that a microbatch begins, with its forward. loader: the user's, of a script. split: by `mw.split`."""

    def in_stage(self, stage: int, microbatch: int) -> None:
        """Note that the next forward or backward is that of a microbatch in a stage of a pipeline."""

    def forward_ends(self) -> None:
        """Note that the forward in a stage is over; its backward comes later, maybe after other forwards."""

    def loop_ends(self) -> None:
        """Note that the loop is over, or was left."""

    def backward(self, reduce: bool) -> contextlib.AbstractContextManager[None]:
        """Return a context for the backward of a microbatch; reduce: whether it leaves reduced gradients."""

    def loss_known(self, loss: Tensor, scale: float = 1.0) -> None:
        """Take the global loss of the backwards since the last one that reduced. scale: of a job's loss scaler, still
        in the gradients."""

    def step_begins(self, optimizer: Optimizer) -> None:
        """Note that an optimizer begins its step; gradients are reduced."""

    def step_ends(self, optimizer: Optimizer) -> None:
        """Note that the optimizer's step is over."""

    def summed(self, value: Tensor | float) -> None:
        """Take the result of `mw.sum`."""

    def shown(self, where: str, text: str) -> None:
        """Take what the program shows by `mw.print` or `mw.log` at this line."""
