"""Keep a rank's newest losses in a file that outlives it.

The file holds the losses that a killed rank had not yet sent to other ranks.

It has one row per step: step, epoch, sum of the losses times their loss weights, sum of the loss weights. It is mapped
into memory, so that writing a row needs no system call. Tested in tests/job/test_last_step.py.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from meshwise.engine.weighing import Losses, totals_of
from meshwise.records.files import make_folder

ROWS, WIDTH = 4096, 4


def ledger_path(folder: Path, rank: int) -> Path:
    """Return the file in which a rank of the run in `folder` keeps its losses."""
    return folder / "workers" / f"losses{rank}.bin"


class LossLedger:
    """Writes the losses of one rank to its file. Rows of an earlier attempt stay until they are overwritten."""

    def __init__(self, folder: Path, rank: int) -> None:
        path, size = ledger_path(folder, rank), ROWS * WIDTH * 8
        make_folder(path.parent)
        with path.open("a+b") as file:
            os.posix_fallocate(file.fileno(), 0, size)  # a mapped page for which no room is left ends the process
            self._rows = memoryview(mmap.mmap(file.fileno(), size)).cast("d")

    def note(self, epoch: int, step: int, losses: Losses) -> None:
        """Write the losses of a step. The losses must be on the CPU."""
        at, rows = step % ROWS * WIDTH, self._rows
        rows[at] = 0.0
        (loss, weight), *more = losses
        if not more and isinstance(weight, float):
            rows[at + 1], rows[at + 2], rows[at + 3] = epoch, float(loss) * weight, weight
        else:
            rows[at + 1], (rows[at + 2], rows[at + 3]) = epoch, totals_of([losses])[0].tolist()
        rows[at] = step  # last: a row that is whole has its number


def noted(folder: Path, ranks: int, first: int, last: int) -> Iterator[tuple[int, int, Tensor]]:
    """Yield (epoch, step, sums) for each step from `first` to `last` that every rank has written to its file.

    The sums are a tensor of shape (ranks, 2): per rank, the sum of the losses times their weights, and the sum of the
    weights.
    """
    tables = []
    for rank in range(ranks):
        path = ledger_path(folder, rank)
        data = path.read_bytes() if path.is_file() else b""
        if len(data) != ROWS * WIDTH * 8:
            return
        tables.append(torch.frombuffer(bytearray(data), dtype=torch.float64).view(ROWS, WIDTH))
    for step in range(first, last + 1):
        rows = torch.stack([table[step % ROWS] for table in tables])
        if bool((rows[:, 0] == step).all()) and len(rows[:, 1].unique()) == 1:
            yield int(rows[0, 1]), step, rows[:, 2:]
