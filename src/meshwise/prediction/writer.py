"""Gather predicted rows to rank 0 in batches, and write them.

A thread writes them while the next batches are computed.

Tested in tests/prediction/test_predict.py.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from meshwise.prediction.files import Outputs, Store, saying_what_is_kept
from meshwise.spec.plan import Plan
from meshwise.transfer import collectives, stages

Send = Callable[..., None]
WRITE_SECONDS = 1.0  # from one write to the next: what a killed run loses
WRITE_BYTES = 32 << 20  # of one rank, likewise: what rank 0 holds of each


@dataclass
class _Waiting:
    """The predictions of this rank that still have to be gathered and written.

    rows: for each batch, the predicted rows of this rank's samples.
    nan: the indices of the samples in the data set whose predicted rows contain NaN.
    """

    rows: list[Outputs] = field(default_factory=list)
    nan: list[int] = field(default_factory=list)

    def take(self, outputs: Outputs, indices: Tensor) -> None:
        self.rows.append(outputs)
        for rows in outputs.values():
            if isinstance(rows, Tensor) and rows.is_floating_point() and math.isnan(rows.sum()):  # infinities too
                self.nan += indices[: len(rows)][
                    rows.flatten(1).isnan().any(1) if rows.dim() > 1 else rows.isnan()
                ].tolist()

    @property
    def nbytes(self) -> int:
        return sum(rows.nbytes for each in self.rows for rows in each.values() if isinstance(rows, Tensor))


class Writer:
    """Gathers the predicted rows of all ranks on rank 0 after every few batches, and writes them there. Collective.

    A thread writes the rows in order while the next batches are computed.
    """

    def __init__(self, store: Store, out: Path | None, plan: Plan, rank: int, written: int, say: Send) -> None:
        self.written, self.nan = written, list[int]()
        self._store, self._out, self._rank, self._say = store, out, rank, say
        self._of_first = rank % (plan.within_samples // plan.pipeline) == 0  # others have the same rows
        self._waiting, self._every, self._flushed = _Waiting(), 1, time.perf_counter()
        self._thread, self._writing = ThreadPoolExecutor(1), Future[None]()
        self._writing.set_result(None)

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self._thread.shutdown()
        if kind is None:
            self._writing.result()

    def take(self, rows: Outputs, indices: Tensor, at: int) -> None:
        """Take this rank's rows of a batch, with the indices of their samples.

        at: the number of samples that have been predicted after this batch.
        """
        self._waiting.take(rows, indices)
        if len(self._waiting.rows) >= self._every:
            self.flush(at)

    def flush(self, at: int) -> None:
        """Gather the rows that the ranks have predicted since the last call on rank 0, and begin to write them.
        Collective.

        at: the number of samples that all ranks together have predicted so far.
        """
        if not self._waiting.rows:
            return
        now, waiting = time.perf_counter(), self._waiting
        pieces, nan = self._on_first(waiting)
        held = sum(rows.nbytes for each in pieces for rows in each.values() if isinstance(rows, Tensor))
        size = max(waiting.nbytes, held // collectives.world_size(), 1)
        wanted = min(WRITE_SECONDS / max(now - self._flushed, 1e-6), WRITE_BYTES / size, 8)
        every = max(1, int(len(waiting.rows) * wanted))
        self._every = collectives.broadcast_object(every, collectives.everyone())
        if self._rank == 0:
            self._writing.result()
            self._writing = self._thread.submit(self._write, self.written, pieces)
            self.nan += nan
            self._say("predicted", done=at)
        self.written, self._waiting, self._flushed = at, _Waiting(), time.perf_counter()

    def _on_first(self, waiting: _Waiting) -> tuple[list[Outputs], list[int]]:
        """Gather the rows of all ranks on rank 0, and return them there. Other ranks get empty lists.

        The rows are gathered within each pipeline first, then from the first rank of each pipeline.
        """
        rows, nan, pipe = waiting.rows, waiting.nan, stages.pipe()
        if self._of_first and pipe is not None:
            rows, nan = gathered(rows, nan, pipe.group)
        first = self._of_first and (pipe is None or pipe.rank == 0)
        return gathered(rows, nan) if first else ([], [])

    def _write(self, first: int, pieces: Sequence[Outputs]) -> None:
        with saying_what_is_kept(self._out):
            self._store.add(first, pieces)


def gathered(
    rows: Sequence[Outputs], nan: Sequence[int], group: collectives.Group = None
) -> tuple[list[Outputs], list[int]]:
    """Gather the predicted rows of all ranks on rank 0 of the group, and return (rows, nan) there. Collective. Other
    ranks get empty lists.

    rows: this rank's rows of each batch. In the result, they are in the order of the batches, and within a batch in the
        order of the ranks.
    nan: the indices of this rank's samples with NaN. In the result, the indices of all ranks are sorted.

    Tensors may have any shapes, and are sent as bytes. Lists are pickled.
    """
    mine = [{name: _form(value) for name, value in each.items()} for each in rows]
    ranks = collectives.gather_objects((mine, nan), group)
    if len(ranks) == 1:
        return list(rows), list(nan)
    tensors = [value for each in rows for value in each.values() if isinstance(value, Tensor)]
    sent = torch.cat([value.contiguous().reshape(-1).view(torch.uint8) for value in tensors]) if tensors else None
    if collectives.get_rank(group) != 0:
        if sent is not None and len(sent):
            collectives.send(sent, 0, group)
        return [], []
    every = [list(rows)]
    for rank, (forms, _) in enumerate(ranks[1:], 1):
        sizes = [form[2] for each in forms for form in each.values() if isinstance(form, tuple)]
        buffer = torch.empty(sum(sizes), dtype=torch.uint8)
        if len(buffer):
            collectives.receive(buffer, rank, group)
        values = iter(buffer.split(sizes) if sizes else ())
        every.append([{name: _value(form, values) for name, form in each.items()} for each in forms])
    in_order = [each for batch in zip(*every, strict=True) for each in batch if each and len(next(iter(each.values())))]
    return in_order, sorted(index for _, found in ranks for index in found)


def _form(value: Any) -> Any:
    """Return what a rank sends to rank 0 first for `value`. For a tensor, this is (shape, dtype, size in bytes), and
    the bytes follow later. A list is sent whole at once."""
    return (tuple(value.shape), value.dtype, value.nbytes) if isinstance(value, Tensor) else value


def _value(form: Any, parts: Iterator[Tensor]) -> Any:
    if not isinstance(form, tuple):
        return form
    shape, dtype, _ = form
    return next(parts).clone().view(dtype).reshape(shape)
