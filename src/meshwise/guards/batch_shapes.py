"""Warn when a step's batches have different shapes on different ranks.

`collate_fn` sees this rank's samples alone, and pads to their longest.

In the first backwards, shapes without the samples' dimension are sent with the loss (agreed.py), until they differ.
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
    "{place}: batches of one step have different shapes on different ranks ({shapes}, beside the samples): collate_fn "
    "sees the samples of one rank, and pads to the longest of these. The results equal those of one device only if the "
    "model and the loss mask the padding, and no random numbers are drawn in its shape (dropout, with --exact-random "
    "too). Else pad to a fixed length, or keep this loader as it is, and cut its batches with x, y = mw.split(x, y)."
)


class BatchShapes:
    """Records the shapes of this rank's batches since the last backward. `Agreed` compares them between the ranks."""

    def __init__(self) -> None:
        self.given: dict[object, tuple[str, str, Any]] = {}
        """For each loader, the shapes of its newest batch."""
        self._told = False

    def begins(self) -> None:
        """Allow another warning about different shapes. This is called when a new program begins. It is also called
        when a loop begins for the 1st, 2nd, 4th, 8th ... time at its source line."""
        self._told = False

    def batch_given(self, loop: LoopRead, given: tuple[Any, BatchSlice]) -> None:
        """Record the shapes of a batch that a loader has yielded. given: the batch, and this rank's slice of the global
        batch."""
        self.note(loop.loader, *given, user_place())

    def note(self, loader: object, batch: Any, part: BatchSlice, place: str) -> None:
        """Record the shapes of this rank's part of a batch. place: the user's source line that receives the batch."""
        if not self._told and not part.whole:
            self.given[loader] = SHAPES, place, shapes_beside_samples(batch, len(part.indices))

    def take(self) -> Settings:
        """Return the shapes of the newest batches, and forget them. `Agreed` includes them in its next checksum."""
        given = tuple(self.given.values())
        self.given.clear()
        return given

    def differ(self, ranks: Sequence[Settings]) -> str:
        """The first time that the ranks' batches differ in shape, return a sentence that says how. Otherwise return an
        empty string."""
        for settings in ranks:
            for (name, place, mine), (_, _, of_rank_0) in zip(settings, ranks[0], strict=False):
                if name == SHAPES and not self._told and None not in (mine, of_rank_0):
                    for one, other in zip(of_rank_0, mine, strict=False):
                        if one != other:
                            self._told = True
                            return OTHER.format(place=place, shapes=f"{_shown(one)} and {_shown(other)}")
        return ""


def shapes_beside_samples(batch: Any, samples: int) -> tuple[tuple[int, ...], ...] | None:
    """Return the shape of each tensor of a batch, without the dimension of the samples."""
    tensors: list[Tensor] = [tensor for tensor in tensors_in(batch) if tensor.dim() > 1]
    if any(samples not in tensor.shape[:2] for tensor in tensors):
        return None
    if sum(tensor.dim() > 2 for tensor in tensors) >= max(samples, 2):
        return None
    found = ((tuple(t.shape), t.shape[0] != samples) for t in tensors)
    return tuple(shape[:1] + shape[2:] if second else shape[1:] for shape, second in found)


def _shown(shape: tuple[int, ...]) -> str:
    return " × ".join(map(str, shape))
