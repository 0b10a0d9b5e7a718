"""Infer the phases of a training loop from its engine calls.

next batch asked for .. given      data
batch given .. backward            forward (in a script: the user's own code up to the loss)
backward                           backward
optimizer.step                     optimizer
batch given .. next batch asked    evaluate, when no backward came in between
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from meshwise.reports.recorder import Mark, current
from meshwise.torch_compat.profiling import NVTX, is_profiled, open_range
from meshwise.training.data.order import BatchSlice
from meshwise.training.engine.loops import LoopRead

LOSS_EVERY = 0.2  # seconds between two recorded losses, because reading every loss would be slow


class Phases:
    """Tracks the phase of a training loop, such as forward or backward, and counts its steps."""

    def __init__(self) -> None:
        self.steps = 0
        """How many steps had ended when a batch was last requested, including those of earlier runs of the loop."""
        self._recorder = current()
        self._range: Any = None  # the open range of an attached profiler
        self.since: Mark | None = None
        """When the current phase began, if it is recorded at its end; otherwise None."""
        self.trained = self._open = False  # whether a backward ran since the last batch, and since the last step
        self._optimizer: Mark | None = None
        self._stepped = False
        self._before = "idle"  # the phase in which the last backward began
        self.optimizers = False
        """Whether the program's optimizers are known. If not, each batch with a backward counts as a step."""
        self._counted = 0.0
        self.number = 0
        """The number of the step that the newest backward belongs to."""
        self.look: Callable[[], None] = lambda: None
        """Checks that recent losses are finite. Called after a backward, at most once in LOSS_EVERY seconds."""

    @property
    def step(self) -> int:
        """The number of the current step. Between two loops, the number of the last step."""
        return self.steps + (self.trained or self.step_done)

    @property
    def step_done(self) -> bool:
        """Whether a step has ended that is not counted in `steps` yet."""
        return self._open and (self._stepped or not self.optimizers)

    @property
    def done(self) -> int:
        """How many steps have ended, over all loaders."""
        return self.steps + self.step_done

    @property
    def half(self) -> bool:
        """Whether a step is half done: it has had a backward, but has not ended yet."""
        return self._open and not self.step_done

    def step_over(self) -> None:
        """Record the end of a step in a program that requests no batches."""
        self.steps, self._open, self._stepped, self.trained = self.steps + 1, False, False, False
        self._recorder.begin_step(self.steps + 1)

    def batch_asked(self, loop: LoopRead | None) -> None:
        """Record that `loop` requests its next batch, which may not exist."""
        self._recorder = current()
        if self._open and (self._stepped or not self.optimizers):
            self.steps += 1
            self._open = self._stepped = False
        since = None if self.trained else self.since
        self.trained = False
        self.since = self._recorder.turn("data", "evaluate", since)
        if NVTX or is_profiled():
            self._range = open_range("data")

    def batch_given(self, loop: LoopRead | None, batch: object) -> None:
        """Record that the loop has received its next batch."""
        recorder, step = self._recorder, None if loop is None else loop.step
        recorder.begin_step(self.steps + 1 if step is None else step)
        since = recorder.turn("forward" if step is None else "idle", "data", self.since)
        self.since = since if step is None else None
        if self._range is not None:
            self._close_range()

    def loop_ends(self, loop: LoopRead) -> None:
        """Record that a loop gets no further batch."""
        if current().phase == "data":
            self.since = None
            if sys.exc_info()[0] is None:
                current().come_to("idle")
        self._close_range()

    def _close_range(self) -> None:
        if self._range is not None:
            self._range.__exit__(None, None, None)
            self._range = None

    def backward_begins(self, loss: object, part: BatchSlice | None, *_: object) -> None:
        """Record that a backward begins."""
        if self.since is None:  # a backward outside of loops
            self._recorder = current()
        recorder = self._recorder
        if not self.trained and part is not None:
            recorder.samples += part.total
        self._stepped = self._stepped and self._open  # forget a step without a backward: it only prepared state
        self.trained = self._open = True
        self.number = self.steps + 1
        self._before = recorder.phase
        self.since = recorder.turn("backward", "forward", self.since)
        if NVTX or is_profiled():
            self._range = open_range("backward")

    def backward_ends(self, mean: Tensor | float | None, own: Tensor | float | None) -> None:
        """Record the end of a backward."""
        if self._range is not None:
            self._close_range()
        assert self.since is not None
        if mean is None:
            self._recorder.ended("backward", self.since)
            return
        self.since = self._recorder.turn(self._before, "backward", self.since)
        now = time.monotonic()
        if now - self._counted > LOSS_EVERY:
            self._counted = now
            self._recorder.count("loss", mean.detach() if isinstance(mean, Tensor) else mean)
            self.look()

    def step_begins(self, optimizer: Optimizer) -> None:
        """Record that an optimizer of the program begins its step."""
        if not self.trained:
            self._recorder = current()
        self._optimizer = self._recorder.turn("optimizer")

    def step_ends(self, optimizer: Optimizer) -> None:
        """Record that an optimizer's step has ended."""
        now = self._recorder.turn("idle", "optimizer", self._optimizer)
        self._optimizer, self._stepped = None, True
        if self.since is not None:
            self.since = now
