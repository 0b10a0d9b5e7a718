"""Tell an outside watcher, such as `meshwise check`, what an engine does."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, Protocol

from torch import Tensor
from torch.optim import Optimizer

from meshwise.data.order import BatchSlice
from meshwise.spec.plan import Plan
from meshwise.spec.world import World


class Watcher(Protocol):
    """Observes an engine from outside, as `meshwise check` does. Its methods are called in the same order on every
    rank."""

    def choose_plan(self, plan: Plan, world: World) -> Plan:
        """Return the plan under which to run the watched program. `meshwise check`, for example, may choose another
        precision.

        plan: the plan under which the program would run without a watcher."""

    def loop_begins(self) -> None:
        """Record that a loop over batches begins."""

    def batch_asked(self) -> None:
        """Record that the loop asks for its next batch."""

    def batch_limit(self, batch_size: int) -> int | None:
        """Return the largest number of samples that the next batch may have. 0 ends the loop, and None sets no
        limit."""

    def batch_given(self, part: BatchSlice, batch: Any, *, loader: Any = None, split: bool = False) -> None:
        """Record that a microbatch is read, and that its forward begins.

        part: this rank's slice of the batch.
        loader: the script's loader.
        split: whether `mw.split` made the batch."""

    def in_stage(self, stage: int, microbatch: int) -> None:
        """Record which stage and microbatch of a pipeline the next forward or backward is for."""

    def forward_ends(self) -> None:
        """Record that this rank has finished the forward of a microbatch in one pipeline stage. Its backward comes
        later."""

    def loop_ends(self) -> None:
        """Record that a loop has ended, or that the program has left it."""

    def backward(self, reduce: bool) -> contextlib.AbstractContextManager[None]:
        """Return a context manager for the backward of a microbatch. reduce: whether gradients are reduced after the
        backward."""

    def loss_known(self, loss: Tensor, scale: float = 1.0) -> None:
        """Record the global loss of one backward in a script, or of all microbatches in a step of a job.
        scale: the factor of a job's loss scaler. `loss` is without this factor, but the gradients still have it."""

    def step_begins(self, optimizer: Optimizer) -> None:
        """Record that an optimizer begins a step, with reduced gradients."""

    def step_ends(self, optimizer: Optimizer) -> None:
        """Record that an optimizer's step has ended."""

    def shown(self, where: str, text: str) -> None:
        """Record a text that the program prints by `mw.print` or logs by `mw.log`. where: the user's source line."""


class CallWatcher(Protocol):
    """Observes the calls of models in a program that sees whole batches, as `meshwise check` does."""

    def on_trial(self) -> contextlib.AbstractContextManager[None]:
        """Return a context manager for a run of a model whose results the program does not get."""

    def attempt(self, part: Any) -> Callable[[], None]:
        """Record that a call begins on the rows that this rank has of a split tensor, a `SplitPart`. Return a function
        that takes back what was recorded since, because the call runs anew."""
