"""Log what moved while a block ran: operation, devices, bytes, seconds.

    with comm_log() as log:
        copy(there, here)
    print(log)

Without an open log, a transfer only checks that a list is empty. On CUDA, the seconds come from events that are read
when the log is read, after the block, so nothing waits within the block; inside the block they are nan.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from meshwise.spec.devices import has_streams
from meshwise.spec.units import bytes_text, seconds_text
from meshwise.terminal.table import table_lines


@dataclass(frozen=True)
class Transfer:
    """One transfer of bytes between devices or between ranks.

    operation: the name of the operation, such as `copy` or `all-reduce`.
    source, target: the names of devices or ranks.
    path: how the bytes are carried, such as `peer` or `gloo`.
    seconds: how long the transfer took. nan if that is unknown.
    """

    operation: str
    source: str
    target: str
    bytes: int
    path: str
    seconds: float


class CommLog(Sequence[Transfer]):
    """The transfers of a `with` block, in the order in which they began. `print(log)` shows them as a table."""

    def __init__(self) -> None:
        self.running = True
        self._rows: list[tuple[Transfer, Seconds]] = []

    def add(self, transfer: Transfer, seconds: Seconds) -> None:
        """Add a transfer to the log.

        seconds: a number, or a function that waits until the transfer is done and returns the number.
        """
        self._rows.append((transfer, seconds))

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(len(self))[index]]
        transfer, seconds = self._rows[index]
        if callable(seconds):
            if self.running:
                return transfer
            seconds = seconds()
            self._rows[index] = transfer, seconds
        return replace(transfer, seconds=seconds)

    def __len__(self) -> int:
        return len(self._rows)

    def __str__(self) -> str:
        return table(self)


OPEN: list[CommLog] = []
"""The open logs of all threads. While the list is empty, nothing is logged."""


@contextmanager
def comm_log() -> Iterator[CommLog]:
    """Log every transfer and collective of meshwise that begins in the `with` block.

    Blocks may be nested. An outer log also gets the transfers of the inner block.
    """
    log = CommLog()
    OPEN.append(log)
    try:
        yield log
    finally:
        OPEN[:] = [other for other in OPEN if other is not log]
        log.running = False


def note(operation: str, source: str, target: str, bytes: int, path: str, seconds: Seconds) -> None:
    """Add one transfer to every `comm_log` that is open.

    seconds: how long the transfer took, or a function that returns this number. The log calls the function when it is
        read after the `with` block.
    """
    for log in OPEN:
        log.add(Transfer(operation, source, target, bytes, path, math.nan), seconds)


def totals(moves: Sequence[Transfer]) -> dict[str, tuple[int, int, float]]:
    """Return (number of transfers, bytes, seconds) for each path."""
    found: dict[str, tuple[int, int, float]] = {}
    for move in moves:
        count, size, seconds = found.get(move.path, (0, 0, 0.0))
        found[move.path] = (count + 1, size + move.bytes, seconds + move.seconds)
    return found


def table(moves: Sequence[Transfer]) -> str:
    """Format transfers as a table. It has one line per transfer, and one line per path with the path's totals."""
    if not moves:
        return "nothing was moved"
    rows = [_row(move) for move in moves]
    for path, (count, size, seconds) in totals(moves).items():
        rows.append(_row(Transfer(f"{count} in all", "", "", size, path, seconds)))
    titles = ["operation", "from", "to", "bytes", "path", "time", "rate"]
    return "\n".join(line.plain for line in table_lines(titles, rows, left=(0, 1, 2, 4)))


def _row(move: Transfer) -> tuple[str, ...]:
    rate = f"{move.bytes / move.seconds / 1e9:.2f} GB/s" if move.seconds > 0 else ""
    ends = move.operation, move.source, move.target
    return *ends, bytes_text(move.bytes), move.path, seconds_text(move.seconds), rate


Seconds = float | Callable[[], float]
"""Seconds, or a function that waits until they are known and returns them."""


class Stopwatch:
    """A timer that starts when it is created."""

    def __init__(self, device: torch.device | None, stream: torch.Stream | None = None) -> None:
        timed = device is not None and has_streams(device)
        self._events = [torch.Event(device, enable_timing=True) for _ in range(2)] if timed else []
        for event in self._events[:1]:
            event.record(stream)
        self._start = time.perf_counter()

    def stop(self, stream: torch.Stream | None = None) -> Seconds:
        """Return the seconds since the start, or a function that waits for them and returns them."""
        if not self._events:
            return time.perf_counter() - self._start
        self._events[1].record(stream)
        return self._elapsed

    def _elapsed(self) -> float:
        start, end = self._events
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3
