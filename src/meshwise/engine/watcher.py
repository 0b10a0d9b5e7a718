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
    """Observes an engine from outside, as `meshwise check` does. Called on every rank, in the same order."""

    def choose_plan(self, plan: Plan, world: World) -> Plan:
        """Return the plan to apply in place of `plan`."""

    def loop_begins(self) -> None:
        """Record that a loop over batches begins."""

    def batch_asked(self) -> None:
        """Record that the loop asks for its next batch."""

    def batch_limit(self, batch_size: int) -> int | None:
        """Return the largest size that the next batch may have; 0 ends the loop, None sets no limit."""

    def batch_given(self, part: BatchSlice, batch: Any, *, loader: Any = None, split: bool = False) -> None:
        """Record that a microbatch begins with its forward. loader: a script's loader. split: whether by `mw.split`."""

    def in_stage(self, stage: int, microbatch: int) -> None:
        """Record which stage and microbatch of a pipeline the next forward or backward belongs to."""

    def forward_ends(self) -> None:
        """Record that the forward of a microbatch in a stage has ended; the microbatch's backward comes later."""

    def loop_ends(self) -> None:
        """Record that the loop has ended, or that the program left it."""

    def backward(self, reduce: bool) -> contextlib.AbstractContextManager[None]:
        """Return a context for the backward of a microbatch. reduce: whether gradients are reduced after it."""

    def loss_known(self, loss: Tensor, scale: float = 1.0) -> None:
        """Record the global loss of the backwards since the last reduction. scale: the factor of a job's loss scaler,
        which the gradients still contain."""

    def step_begins(self, optimizer: Optimizer) -> None:
        """Record that an optimizer begins its step; its gradients are reduced."""

    def step_ends(self, optimizer: Optimizer) -> None:
        """Record that an optimizer's step has ended."""

    def summed(self, value: Tensor | float) -> None:
        """Record the result of `mw.sum`."""

    def shown(self, where: str, text: str) -> None:
        """Record what the program shows by `mw.print` or `mw.log` at the source line `where`."""
