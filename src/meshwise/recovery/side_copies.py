"""Copy state to pinned host memory on a side stream, during training.

The copies overlap the next step's forward and backward; the next optimizer step waits for them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

from meshwise.compat import copying, driver


class SideCopies:
    """Copies tensors of one device to the host on a side stream. Only one copy runs at a time."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._stream = device, torch.Stream(device)
        self._done = torch.Event(device)
        self._thread = ThreadPoolExecutor(1, "meshwise-copies")
        self._waiting: Future[None] | None = None
        self._pinned: Tensor | None = None

    def pin(self, memory: Tensor) -> None:
        """Pin host memory, so that copies into it run asynchronously. The memory from the previous call of `pin` is
        unpinned.
        """
        self.finish()
        if self._pinned is not None:
            driver.unpin(self._pinned)
        self._pinned = memory if driver.pin(memory) else None

    def copy(self, into: Sequence[Tensor], sources: Sequence[Tensor], then: Callable[[], None]) -> None:
        """Begin to copy tensors, after the work that is already queued on the current stream.

        then: a function that is called in another thread when everything is copied.
        """
        self.finish()
        self._stream.wait_stream(self._current())
        with self._stream:
            copying.copy_all(into, sources, non_blocking=True)
            self._done.record(self._stream)
        self._waiting = self._thread.submit(self._wait, then)

    def _wait(self, then: Callable[[], None]) -> None:
        self._done.synchronize()
        then()

    def hold_back(self) -> None:
        """Make the current stream wait until the copies that `copy` has begun are done.

        Work that the program queues afterwards may change the tensors that are being copied.
        """
        if self._waiting is not None:
            self._current().wait_event(self._done)

    def _current(self) -> torch.Stream:
        stream: torch.Stream = torch.get_device_module(self._device).current_stream(self._device)
        return stream

    def finish(self) -> None:
        """Wait until the last call of `copy` is complete: its tensors are on the host, and its argument `then` was
        called.
        """
        waiting, self._waiting = self._waiting, None
        if waiting is not None:
            waiting.result()
