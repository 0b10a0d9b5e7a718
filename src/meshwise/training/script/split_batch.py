"""Divide a batch that all ranks hold: `mw.split`."""

from __future__ import annotations

from typing import Any

import numpy
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from meshwise.spec.errors import UsageError
from meshwise.torch_compat.tree import all_leaves, leaves_of, map_kind
from meshwise.training.data.order import BatchSlice, batch_slice
from meshwise.training.engine.engine import Engine
from meshwise.training.engine.seeds import ModelStream

ARRAYS = (Tensor, numpy.ndarray)


def split_batch(engine: Engine, batch: tuple[Any, ...], *, whole: bool, dim: int) -> tuple[Any, ...]:
    """Begin a step, and return what the program sees of the batch. See `mw.split`."""
    rows, by_rank, several = _rows_in(batch, dim, whole), engine.whole is None, engine.world.size > 1
    if by_rank and several and whole:
        raise UsageError(
            "mw.split(whole=True): a program with view='rank' sees this rank's rows, and a batch without rows is not "
            "divided. Call mw.distribute without view=."
        )
    every = torch.arange(rows)
    part = batch_slice(every, 0, rows, rows, engine.world) if by_rank else BatchSlice(every, rows, rows, 0, rows, True)
    _begin_step(engine, part)
    if not by_rank:
        return batch if whole else tuple(engine.whole.divided_rows(each, dim) for each in batch)
    if engine.given.stream is None:
        engine.given.stream = ModelStream(engine.world, lambda: engine.generator.in_loop)
        engine.ends.callback(engine.given.stream.close)
    engine.given.stream.follow(engine.program.models)
    own = (slice(None),) * dim + (slice(int(part.indices[0]), int(part.indices[-1]) + 1),)
    return map_kind(ARRAYS, lambda each: each[own] if each.ndim > dim else each, batch) if several else batch


def _begin_step(engine: Engine, part: BatchSlice) -> None:
    """Begin a step, except in a loop over batches, which begins its steps itself. part: this rank's part of the batch
    that the program has made."""
    engine.part = part
    engine.reads.ended = None
    if engine.generator.in_loop:
        return
    engine.phases.batch_asked(None)
    if not engine.gate.begin():
        for state in engine.given.loop_states:
            state.stops()
        raise engine.gate.stop(engine.phases.step)
    engine.phases.batch_given(None, None)
    if engine.watcher is not None:
        engine.watcher.batch_asked()
        engine.watcher.batch_given(part, None, split=True)


def _rows_in(batch: tuple[Any, ...], dim: int, whole: bool) -> int:
    """Return how many rows a batch has."""
    leaves = [leaf for leaf in all_leaves(batch) if leaf is not None]
    arrays = [leaf for leaf in leaves if isinstance(leaf, ARRAYS)]
    if whole:
        return next((len(array) for array in arrays if array.ndim and len(array)), 1)
    others = [leaf for leaf in leaves if not isinstance(leaf, ARRAYS)] + list(leaves_of(PackedSequence, batch))
    counts = {array.shape[dim] for array in arrays if array.ndim > dim}
    if others or len(counts) != 1 or 0 in counts:
        shown = [*(str(tuple(array.shape)) for array in arrays), *(type(other).__name__ for other in others)]
        raise UsageError(
            "mw.split divides tensors and arrays that have the same number of rows, at least one, but this batch has "
            f"{', '.join(shown) or 'none'}. Split tensors of other sizes in a separate call, name the dimension of the "
            "samples (mw.split(…, dim=1)), or let every rank compute on the whole batch (mw.split(…, whole=True))."
        )
    return int(counts.pop())
