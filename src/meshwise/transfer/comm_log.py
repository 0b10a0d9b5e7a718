"""Log what moved while a block ran: operation, devices, bytes, seconds.

    with comm_log() as log:
        copy(there, here)
    print(log)

Without an open log, a transfer only costs a look at an empty list. On CUDA, the seconds come from events that are read
when the log is read, after the block, so nothing waits within the block; inside the block they are nan.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import overload

from meshwise.spec.units import bytes_text, seconds_text
from meshwise.terminal.table import table_lines
from meshwise.transfer.stopwatch import Seconds


@dataclass(frozen=True)
class Transfer:
    """One transfer. operation: `copy`, `all-reduce` ... source, target: devices or ranks. path: `peer`, `gloo` ..."""

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
        """Add a row. seconds: a number, or a function that waits for it and returns it."""
        self._rows.append((transfer, seconds))

    @overload
    def __getitem__(self, index: int) -> Transfer: ...
    @overload
    def __getitem__(self, index: slice) -> list[Transfer]: ...
    def __getitem__(self, index: int | slice) -> Transfer | list[Transfer]:
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
"""The open logs, of all threads. While there are none, a transfer only looks at this empty list."""


@contextmanager
def comm_log() -> Iterator[CommLog]:
    """Log every transfer and collective of meshwise that begins in the block. An outer log gets those of inner ones."""
    log = CommLog()
    OPEN.append(log)
    try:
        yield log
    finally:
        OPEN[:] = [other for other in OPEN if other is not log]
        log.running = False


def note(operation: str, source: str, target: str, bytes: int, path: str, seconds: Seconds) -> None:
    """Add one transfer to the open logs. seconds: a float, or a function that is called after the block."""
    for log in OPEN:
        log.add(Transfer(operation, source, target, bytes, path, math.nan), seconds)


def totals(moves: Sequence[Transfer]) -> dict[str, tuple[int, int, float]]:
    """Return (transfers, bytes, seconds) by path. seconds: a sum, even of overlapping ones; nan if one is unknown."""
    found: dict[str, tuple[int, int, float]] = {}
    for move in moves:
        count, size, seconds = found.get(move.path, (0, 0, 0.0))
        found[move.path] = (count + 1, size + move.bytes, seconds + move.seconds)
    return found


def table(moves: Sequence[Transfer]) -> str:
    """Return one line per transfer, and one line per path with its totals."""
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
