"""The phases of a training loop, inferred from where it calls the engine.

next batch asked for .. given      data
batch given .. backward            forward (in a script: the user's own code up to the loss)
backward                           backward
optimizer.step                     optimizer
batch given .. next batch asked    evaluate, when no backward came in between
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from meshwise.compat.profiling import NVTX, is_profiled, open_range
from meshwise.timeline.recorder import Mark, current

LOSS_EVERY = 0.2  # seconds: reading each loss would cost more than it tells


class Phases:
    """Where a training loop stands."""

    def __init__(self) -> None:
        self._steps = 0
        self._asked: Mark = 0
        self._range: Any = None  # of a profiler that is attached
        self._since: Mark | None = None
        self._trained = self._open = False  # a backward since the last batch was given, and since the last step's end
        self._optimizer: Mark | None = None
        self._stepped = False
        self.optimizers = False
        """Whether the program's optimizers are known; without any, each batch with a backward is a step."""
        self._counted = 0.0
        self.number = 0
        """Of the step that the newest backward was in."""

    @property
    def step(self) -> int:
        """The step that is worked on; between loops, the last."""
        return self._steps + (self._trained or self.step_done)

    @property
    def trained(self) -> bool:
        """Whether there was a backward since the last batch was given."""
        return self._trained

    @property
    def step_done(self) -> bool:
        """Whether a step has ended that is not counted yet; that is done where any loader is asked for a batch."""
        return self._open and (self._stepped or not self.optimizers)

    @property
    def done(self) -> int:
        """The steps that have ended, whatever loaders were read in them."""
        return self._steps + self.step_done

    @property
    def half(self) -> bool:
        """Whether there was a backward whose step has not ended."""
        return self._open and not self.step_done

    def go_on(self, steps: int) -> None:
        """So many steps were recorded before this loop."""
        self._steps = steps

    def batch_asked(self) -> None:
        """The loop asks for its next batch, which may not come."""
        recorder = current()
        if self._since is not None and not self._trained:
            recorder.add(recorder.code("evaluate"), self._since, recorder.mark())
        if self.step_done:
            self._steps += 1
            self._open = self._stepped = False
        self._since, self._trained = None, False
        recorder.come_to("data")
        self._asked = recorder.mark(on_device=False)
        self._range = open_range("data") if NVTX or is_profiled() else None

    def batch_given(self, step: int | None) -> None:
        """The loop has its batch. step: its number, where the loop counts for itself."""
        recorder = current()
        recorder.begin_step(self._steps + 1 if step is None else step)
        recorder.ended("data", self._asked, recorder.host_lane, on_device=False)
        self._close_range()
        recorder.come_to("forward" if step is None else "idle")
        self._since = recorder.mark() if step is None else None

    def batches_end(self) -> None:
        """No batch is waited for any more. After an error the phase stays, to be named in the report."""
        if sys.exc_info()[0] is None and current().phase == "data":
            current().come_to("idle")
        self._close_range()

    def _close_range(self) -> None:
        if self._range is not None:
            self._range.__exit__(None, None, None)
            self._range = None

    def backward(self, samples: int) -> contextlib.AbstractContextManager[None]:
        """The loop is in `mw.backward`; the global batch has so many samples."""
        recorder = current()
        if self._since is not None:
            recorder.ended("forward", self._since)
        if not self._trained:
            recorder.samples += samples
        self._stepped = self._stepped and self._open  # a step before the first backward prepares state
        self._trained = self._open = True
        self.number = self._steps + 1
        return recorder.span("backward")

    def optimizer_begins(self, optimizer: Optimizer) -> None:
        recorder = current()
        recorder.come_to("optimizer")
        self._optimizer = recorder.mark()

    def optimizer_ends(self, optimizer: Optimizer) -> None:
        recorder = current()
        if self._optimizer is not None:
            recorder.ended("optimizer", self._optimizer)
        recorder.come_to("idle")
        self._optimizer, self._stepped = None, True
        if self._since is not None:
            self._since = recorder.mark()

    def loss(self, loss: Tensor, look: Callable[[], None]) -> None:
        """The backward is over. Note the global loss, now and then. look: looks at those of one device."""
        self._since = current().mark()
        now = time.monotonic()
        if now - self._counted > LOSS_EVERY:
            self._counted = now
            current().count("loss", loss.detach())
            look()
