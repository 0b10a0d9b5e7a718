"""The recorder: spans of one rank, written down while the run goes on.

Recording is an append to a list; spans are resolved and handed on in batches, off the hot path. On CUDA the marks of
device work are events, read with `query` once they have passed, so that recording never synchronises.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType

import torch

from meshwise.timeline.spans import Span

Mark = int | torch.cuda.Event


class Recorder:
    """Records spans of one rank. `sink` receives resolved spans when `flush` is called."""

    def __init__(self, sink: Callable[[list[Span]], None] | None = None, device: str = "cpu") -> None:
        self.step = 0
        self.phase = "idle"
        self._sink = sink
        self._raw: list[tuple[str, Mark, Mark, int, str, int]] = []
        self._events = device.startswith("cuda")
        self._base: tuple[torch.cuda.Event, int] | None = None
        if self._events:
            torch.cuda.synchronize()
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            torch.cuda.synchronize()
            self._base = (event, time.perf_counter_ns())

    def mark(self, on_device: bool = True) -> Mark:
        """Now, on the device's clock where the device runs behind the host."""
        if self._events and on_device:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            return event
        return time.perf_counter_ns()

    def add(self, kind: str, start: Mark, end: Mark, name: str = "", bytes: int = 0) -> None:
        if self._sink is None:
            return
        self._raw.append((kind, start, end, self.step, name, bytes))

    def span(self, kind: str, name: str = "", on_device: bool = True) -> _Open:
        """Record the body of a with-statement as one span."""
        return _Open(self, kind, name, on_device)

    def flush(self) -> None:
        """Hand the spans that are over to the sink; device work that still runs stays for the next time."""
        ready: list[tuple[str, Mark, Mark, int, str, int]] = []
        later: list[tuple[str, Mark, Mark, int, str, int]] = []
        for raw in self._raw:
            (ready if self._passed(raw[2]) else later).append(raw)
        self._raw = later
        if ready and self._sink is not None:
            self._sink(
                [Span(kind, self._time(a), self._time(b), step, name, size) for kind, a, b, step, name, size in ready]
            )

    def _passed(self, mark: Mark) -> bool:
        return isinstance(mark, int) or mark.query()

    def _time(self, mark: Mark) -> int:
        if isinstance(mark, int):
            return mark
        assert self._base is not None
        event, origin = self._base
        return origin + int(event.elapsed_time(mark) * 1e6)


class _Open:
    """A span that is still open."""

    __slots__ = ("_before", "_kind", "_name", "_on_device", "_recorder", "_start")

    def __init__(self, recorder: Recorder, kind: str, name: str, on_device: bool) -> None:
        self._recorder, self._kind, self._name, self._on_device = recorder, kind, name, on_device

    def __enter__(self) -> None:
        recorder = self._recorder
        self._before, recorder.phase = recorder.phase, self._kind
        self._start = recorder.mark(self._on_device)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        recorder = self._recorder
        recorder.add(self._kind, self._start, recorder.mark(self._on_device), self._name)
        if error is None:
            recorder.phase = self._before  # after an error the phase stays, to be named in the report
