"""Keep gradients on their rank inside `mw.accumulate()`.

The next backward outside of it reduces them, or `optimizer.step`, or any code that reads or sets a `.grad` before:
clipping, unscaling, logging a norm and an update by hand find the gradients of one device.

Tested in tests/engine/test_waiting_gradients.py.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator

import torch
from torch import Tensor

from meshwise.compat import gradient_reads
from meshwise.engine.program import Program
from meshwise.transfer.reading import look_out, meet

ALONE = (
    "{here}: rank {rank} reads a gradient that mw.accumulate() has not added up over the ranks yet, and {other}. All "
    "ranks must read this gradient together. Read it outside of code that only some ranks run, or run the last batch "
    "before it outside of mw.accumulate()."
)


@contextlib.contextmanager
def keeping(program: Program, reduce: bool, watched: contextlib.AbstractContextManager[None]) -> Iterator[None]:
    """Return a context manager for a backward under `mw.accumulate`, or for the first backward after `mw.accumulate`.

    reduce: whether the backward reduces gradients. If not, they stay as they are on each rank. They are reduced when
        code outside of a backward reads or sets the gradient of a parameter.
    watched: another context manager, to enter inside this one."""
    gradient_reads.end()
    with watched:
        yield
    if program.reduction is not None and not reduce:
        look_out()
        gradient_reads.watch(functools.partial(_read, program))


def _read(program: Program, p: Tensor) -> None:
    reduction = program.reduction
    if reduction is None or not reduction.unreduced:
        gradient_reads.end()
    elif any(p is own for own in program.named_parameters().values()):
        meet("a gradient", ALONE)
        gradient_reads.end()
        with torch.inference_mode(False), torch.enable_grad():  # who clips reads without
            reduction.reduce_now()
