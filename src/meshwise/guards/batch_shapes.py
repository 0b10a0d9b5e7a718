"""Warn when a step's batches have different shapes on different ranks.

`collate_fn` sees this rank's samples alone, and pads to their longest.

Shapes without the samples' dimension travel with the loss (agreed.py) in the first backwards, until they differ once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from meshwise.compat.tree import tensors_in
from meshwise.data.order import BatchSlice
from meshwise.engine.loops import LoopRead
from meshwise.guards.replicas import Settings
from meshwise.spec.user_code import user_place

SHAPES = "shapes of a batch"
BACKWARDS = 20  # that it hears the batches of
OTHER = (
    "{place}: batches of one step have different shapes on different ranks ({shapes}, beside the samples): "
    "collate_fn sees the samples of one rank, and pads to their longest. That equals one device only if the model and "
    "the loss mask the padding, and nothing of its shape is drawn (dropout, with --exact-random too). Otherwise pad to "
    "a fixed length; or do not distribute this loader, and cut its batches with x, y = mw.split(x, y)."
)


class BatchShapes:
    """Compares, for `Agreed`, the batches given since the last backward."""

    def __init__(self) -> None:
        self.given: dict[object, tuple[str, str, Any]] = {}
        """The shapes of the newest batch, by loader."""
        self._told = False

    def begins(self) -> None:
        """Handle that another program, or another loop, begins."""
        self._told = False

    def batch_given(self, loop: LoopRead, given: tuple[Any, BatchSlice]) -> None:
        """Note that a loader has given a batch, of which this rank has a part."""
        self.note(loop.loader, *given, user_place())

    def note(self, loader: object, batch: Any, part: BatchSlice, place: str) -> None:
        """Note a batch that the loader gives to the line at `place`."""
        if not self._told and not part.whole:
            self.given[loader] = SHAPES, place, shapes_beside_samples(batch, len(part.indices))

    def take(self) -> Settings:
        """Return the shapes to send along with this backward."""
        given = tuple(self.given.values())
        self.given.clear()
        return given

    def differ(self, ranks: Sequence[Settings]) -> str:
        """Say once, in a sentence, how the ranks' batches differ; empty where they do not."""
        for settings in ranks:
            for (name, place, mine), (_, _, of_rank_0) in zip(settings, ranks[0], strict=False):
                if name == SHAPES and not self._told and None not in (mine, of_rank_0):
                    for one, other in zip(of_rank_0, mine, strict=False):
                        if one != other:
                            self._told = True
                            return OTHER.format(place=place, shapes=f"{_shown(one)} and {_shown(other)}")
        return ""


def shapes_beside_samples(batch: Any, samples: int) -> tuple[tuple[int, ...], ...] | None:
    """Return the shape of each tensor of a batch without its dimension of samples, which is the first or the second.

    None where a tensor has no such dimension: its rows are nodes of a graph or boxes of a picture; and for lists
    that hold a tensor for each sample.
    """
    tensors: list[Tensor] = [tensor for tensor in tensors_in(batch) if tensor.dim() > 1]
    if any(samples not in tensor.shape[:2] for tensor in tensors):
        return None
    if sum(tensor.dim() > 2 for tensor in tensors) >= max(samples, 2):
        return None
    found = ((tuple(t.shape), t.shape[0] != samples) for t in tensors)
    return tuple(shape[:1] + shape[2:] if second else shape[1:] for shape, second in found)


def _shown(shape: tuple[int, ...]) -> str:
    return " × ".join(map(str, shape))
