"""The spans of a loop that is not ours, told from where it calls us.

next batch asked for .. given      data
batch given .. mw.backward         forward (the user's own code up to the loss)
mw.backward                        backward
optimizer.step                     optimizer
batch given .. next batch asked    evaluate, when no backward came in between
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

from torch import Tensor

from meshwise.timeline.recorder import Mark, current

LOSS_EVERY = 0.2  # seconds: reading each loss would cost more than it tells


class OwnSpans:
    """Where a loop of the user's own stands."""

    def __init__(self) -> None:
        self._steps = 0
        self._asked: Mark = 0
        self._since: Mark | None = None
        self._trained = False
        self._optimizer: Mark | None = None
        self._stepped = False
        self._depth = 0  # of steps inside steps: an optimizer may call super().step()
        self.optimizers = False
        """Whether optimizers tell when they step; without any, each batch with a backward is a step."""
        self._counted = 0.0

    def asked(self) -> None:
        """The loop asks for its next batch, which may not come."""
        recorder = current()
        if self._since is not None:
            if self._trained:
                self._steps += self._stepped or not self.optimizers
                self._stepped = False
            else:
                recorder.add(recorder.code("evaluate"), self._since, recorder.mark())
        self._since, self._trained = None, False
        self._asked = recorder.mark(on_device=False)

    def given(self) -> None:
        """The loop has its batch."""
        recorder = current()
        recorder.begin_step(self._steps + 1)
        code = recorder.code("data", lane=recorder.host_lane)
        recorder.add(code, self._asked, recorder.mark(on_device=False))
        recorder.phase_ends("data")
        self._since = recorder.mark()

    @contextlib.contextmanager
    def backward(self, samples: int) -> Iterator[None]:
        """The loop is in `mw.backward`; the global batch has so many samples."""
        recorder = current()
        if self._since is not None:
            recorder.add(recorder.code("forward"), self._since, recorder.mark())
            recorder.phase_ends("forward")
        if not self._trained:
            recorder.samples += samples
        self._trained, self._depth = True, 0
        with recorder.span("backward"):
            yield
        self._since = recorder.mark()

    def optimizer_begins(self) -> None:
        self._depth += 1
        if self._depth == 1:
            self._optimizer = current().mark()

    def optimizer_ends(self) -> None:
        self._depth -= 1
        if self._depth > 0:
            return
        recorder = current()
        if self._optimizer is not None:
            recorder.add(recorder.code("optimizer"), self._optimizer, recorder.mark())
            recorder.phase_ends("optimizer")
        self._optimizer, self._stepped = None, True
        if self._since is not None:
            self._since = recorder.mark()

    def loss(self, loss: Tensor) -> None:
        """Note the global loss, now and then."""
        now = time.monotonic()
        if now - self._counted > LOSS_EVERY:
            self._counted = now
            current().count("loss", loss.detach())
