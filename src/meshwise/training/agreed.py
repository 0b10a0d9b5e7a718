"""What all ranks must hold alike travels with the loss: a checksum of it as 32 signs, no collective of its own.

The mean of a sign over the ranks is 1 or -1 where they agree, exactly and in any precision. So nothing waits for it,
and every rank comes to the same conclusion.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch
from torch import Tensor

from meshwise.compat.fake import rehearsing
from meshwise.spec.devices import has_streams
from meshwise.spec.errors import UsageError
from meshwise.spec.world import World
from meshwise.training.batch_shapes import BatchShapes
from meshwise.training.finite_losses import FiniteLosses, Seen
from meshwise.training.made_in_forward import Made, made_differ, sums_of_made
from meshwise.training.order import BatchSlice
from meshwise.training.replicas import BUFFER, PARAMETERS, parted
from meshwise.training.same_data import SameData
from meshwise.training.settings import Settings, settings_differ
from meshwise.transfer import collectives
from meshwise.transfer.splitmix import mixed_bits

SIGNS = 32
"""How many signs travel: ranks that differ are taken for alike once in 2**32 times."""
_Held = tuple[list[Any], Settings, Seen | None]
STEPS_OF_A_JOB = 8  # whose batches are compared, each with a collective


class Batches(Protocol):
    """Batches that all ranks were given (`mw.split`)."""

    def checksum(self, device: torch.device) -> Tensor:
        """Of all batches so far, an int64 scalar on the device."""
        ...

    def take(self) -> list[Any]:
        """The batches since the last time."""
        ...

    def told(self, taken: list[Any]) -> Any:
        """What is told the other ranks of them."""
        ...

    def explain(self, ranks: list[Any]) -> str:
        """How the ranks differ: one sentence."""
        ...


class Agreed:
    """Compares what the ranks hold. settings: gives those of optimizers and schedulers that are in use now, and sums of
    parameters. notify: takes a line for the user; an empty one says nothing. losses: is told of those that are not
    finite."""

    def __init__(
        self,
        world: World,
        settings: Callable[[], Settings],
        notify: Callable[[str], None],
        losses: FiniteLosses | None = None,
    ) -> None:
        self.world, self.settings, self.notify, self._losses = world, settings, notify, losses
        self.batches: Batches | None = None
        self.shapes, self.data = BatchShapes(), SameData()
        self.made: list[Made] = []
        """What was made in a forward since the last loss."""
        self._now: Settings = ()
        self._crc = 0
        self._signs: tuple[object, Tensor] | None = None  # of the settings alone, as long as they stay
        self._on_its_way: tuple[Tensor, Any, _Held] | None = None

    def with_signs(self, value: Tensor) -> Tensor:
        """A scalar and the signs that travel with it."""
        signs = self.signs(value)
        return torch.cat([value.reshape(1).to(signs), signs])

    def without_signs(self, mean: Tensor, seen: Seen) -> Tensor:
        """Their means over the ranks: compares the signs, and gives the scalar's."""
        self.compare(mean, seen)
        return mean[0]

    def signs(self, like: Tensor) -> Tensor:
        """The checksum as numbers 1 and -1 that travel with `like`: shape (32,)."""
        now = self.settings() + self.shapes.take()
        if self.made:
            now += sums_of_made(self.made)
        if now != self._now:
            self._now, self._crc = now, zlib.crc32(repr(now).encode())
        dtype = torch.promote_types(like.dtype, torch.float32)
        if self.batches is None:
            key = (self._crc, dtype, like.device)
            if self._signs is None or self._signs[0] != key:
                bits = [1.0 if self._crc >> bit & 1 else -1.0 for bit in range(SIGNS)]
                self._signs = key, torch.tensor(bits, dtype=dtype, device=like.device)
            return self._signs[1]
        total = mixed_bits(self.batches.checksum(like.device) + self._crc)
        every: Tensor = (total >> torch.arange(SIGNS, device=like.device)) & 1
        return (every * 2 - 1).to(dtype)

    def compare(self, means: Tensor, seen: Seen | None = None) -> None:
        """All ranks' signs have come together, behind the loss, or its sum and weight, where `seen` tells of which.
        Raises UsageError on every rank where they differ; on an accelerator, which nothing should wait for, with the
        next ones."""
        if rehearsing():  # without values; and the other ranks do what this one does
            return
        held = ([] if self.batches is None else self.batches.take()), self._now, seen
        if not has_streams(means.device):
            self._check(means.tolist(), held)
            return
        earlier, there = self._on_its_way, means.detach().to("cpu", non_blocking=True)
        event = torch.Event(means.device)
        event.record()
        self._on_its_way = there, event, held
        self._check_earlier(earlier)

    def finish(self) -> None:
        """No loss comes any more."""
        earlier, self._on_its_way = self._on_its_way, None
        self._check_earlier(earlier)

    def _check_earlier(self, earlier: tuple[Tensor, Any, _Held] | None) -> None:
        if earlier is not None:
            earlier[1].synchronize()
            self._check(earlier[0].tolist(), earlier[2])

    def compare_batches(self, parts: Iterable[tuple[Any, BatchSlice]], place: str) -> None:
        """Of the first steps of a job, whose losses carry nothing. Collective."""
        if self.world.size > 1 and self.shapes.backwards < STEPS_OF_A_JOB:
            for number, (batch, part) in enumerate(parts):
                self.shapes.given(number, batch, part, place)
            signs = self.signs(torch.zeros((), device=self.world.device))
            self.compare(collectives.all_reduce_mean(signs.clone(), of="shapes"))

    def _check(self, means: list[float], held: _Held) -> None:
        seen, losses = held[2], self._losses
        if seen is not None and losses is not None and not _is_finite(*means[:-SIGNS]):
            losses.found(seen)
        if min(map(abs, means[-SIGNS:])) > 1 - 1 / self.world.size:
            return
        told = None if self.batches is None else self.batches.told(held[0])
        ranks = collectives.gather_objects((told, held[1]))
        held_by = [settings for _, settings in ranks]
        self.notify(parted(held_by, BUFFER))
        self.notify(self.shapes.differ(held_by))
        text = settings_differ(held_by) or parted(held_by, PARAMETERS) or made_differ(held_by)
        if not text and self.batches is not None:
            text = self.batches.explain([batches for batches, _ in ranks])
        if text:
            raise UsageError(text)


def _is_finite(loss: float, weight: float = 1.0) -> bool:
    """Of a mean, or of a sum and its weight."""
    return weight != 0 and math.isfinite(loss / weight)
