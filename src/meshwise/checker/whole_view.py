"""Find this rank's rows of values that a program sees whole.

A check then joins the rows of all ranks, as for a program that sees its rank's rows.
"""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from meshwise.parallel.splits.axis import SplitPart
from meshwise.parallel.splits.crossing import gather
from meshwise.parallel.splits.tensor import SplitTensor, parts_of, split_again
from meshwise.parallel.splits.term import Term, plain
from meshwise.spec.user_code import user_place
from meshwise.torch_compat.torch_function import on_parts
from meshwise.torch_compat.tree import map_tensors
from meshwise.training.data.keyed import Draw, DrawLayout, KeyedDraws, Rows, by_reference, keyed_uniform
from meshwise.training.data.order import BatchSlice, batch_slice
from meshwise.training.engine.engine import Engine
from meshwise.transfer.splitmix import mixed


class RowDraws(KeyedDraws):
    """Computes random numbers also for rows that do not make up one batch, such as the rows of two batches."""

    def __init__(self, key: tuple[int, int, int], rows: Rows, layout: DrawLayout, *, alike: bool) -> None:
        """alike: whether the loop of a run draws from one state on all ranks, as after `mw.split`."""
        super().__init__(key, rows, layout)
        self._part: SplitPart | None = None
        self._alike = alike
        # The lines of draws for some rows from another seed than that of the forward, which a run has by rank.
        self.of_program = set[tuple[str, int]]()  # with a checksum of the generator's state

    @contextlib.contextmanager
    def forward(self) -> Iterator[None]:
        with super().forward():
            self._seed = -1 if self._alike else torch.initial_seed()
            yield

    def draw_for(self, part: SplitPart, reference: Sequence[Draw]) -> None:
        """From now on, draw for the rows that this rank has of a split tensor.

        reference: the draws on one device.
        """
        self._part, self._layout = part, by_reference(reference, Rows(0, part.own, part.length, part.own))

    def attempt(self) -> Callable[[], None]:
        """Return a function that resets the draws to their present state, so that later draws repeat."""
        calls, drawn = dict(self._calls), len(self.log)

        def redraw() -> None:
            self._calls = calls
            del self.log[drawn:]

        return redraw

    def _placed(self, name: str, shape: tuple[int, ...], call: int) -> tuple[tuple[int, ...], int | None] | None:
        found = super()._placed(name, shape, call)
        if found is not None and found[1] is not None and torch.initial_seed() != self._seed:
            self.of_program.add((user_place(), zlib.crc32(torch.get_rng_state().numpy().tobytes())))
        return found

    def _uniform(self, name: str, shape: tuple[int, ...], device: torch.device, call: int) -> Tensor:
        if self._part is None:
            return super()._uniform(name, shape, device, call)
        whole, dim = self._placed(name, shape, call) or (shape, None)
        values = keyed_uniform(mixed(*self._key, call), whole, device)
        if dim is None:
            return values
        each = values.unflatten(dim, (self._part.length, -1))  # a row may have several entries, such as attention heads
        own = replace(self._part, dim=dim).slice_of(each).flatten(dim, dim + 1)
        return own[tuple(map(slice, shape))]


def own_rows(engine: Engine, part: BatchSlice, batch: Any) -> tuple[BatchSlice, Any]:
    """Return this rank's slice of a batch, and the batch with this rank's rows only."""
    count, world = len(part.indices), engine.world
    if engine.whole is None or count < part.micro or world.size == 1:
        return part, batch
    own = batch_slice(part.indices, 0, count, part.total, replace(world, chunks=True))

    def rows(tensor: Tensor) -> Tensor:
        has_rows = tensor.dim() > 0 and len(tensor) == count
        return tensor[own.first : own.first + own.samples] if has_rows else tensor

    return own, map_tensors(rows, batch)


def part_of(tensor: Tensor, samples: int) -> Tensor:
    """Return this rank's rows of a module's output, or all of it if its rows are not samples."""
    if isinstance(tensor, Term):
        return plain(tensor).detach()
    part = tensor.parts.get(0) if isinstance(tensor, SplitTensor) else None
    if part is None:
        return gather(tensor.detach())
    if part.is_plain and part.length == samples:
        with on_parts():
            local = tensor.detach().as_subclass(Tensor)
        return gather(split_again(local, parts_of(tensor, above=0)))
    with part.axis.unheard():  # this read must not count as mixing rows
        return gather(tensor.detach())
