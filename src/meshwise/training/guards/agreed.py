"""Send a checksum of per-rank state with the loss, to detect divergence.

The checksum is 32 signs and takes no collective of its own.

Where the ranks agree, the mean of a sign over the ranks is exactly 1 or -1 in any precision. All ranks see the same
means, so all come to the same conclusion without waiting for each other.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from meshwise.parallel.technique import CARRIED
from meshwise.reports.device_clock import is_captured
from meshwise.spec.devices import has_streams
from meshwise.spec.errors import UsageError
from meshwise.spec.world import World
from meshwise.training.engine.engine import Seen
from meshwise.training.engine.program import Program
from meshwise.training.guards.finite_losses import FiniteLosses
from meshwise.training.guards.replicas import NAMES, Settings, diverged, settings_differ, sums_of
from meshwise.transfer import collectives

SIGNS = CARRIED - 1
"""The number of signs (1 or -1) in a checksum. Two different values have the same checksum once in 2**32 times."""
_Held = tuple[Settings, Seen | None]
PLAIN = frozenset((int, float))


class Agreed:
    """Checks that values such as learning rates are equal on all ranks. Each rank computes a checksum of its values.
    The checksums are averaged over the ranks together with the loss, so the check needs no collective of its own."""

    def __init__(self, world: World, settings: Callable[[], Settings], losses: FiniteLosses | None = None) -> None:
        self.settings, self._losses = settings, losses
        self._alike = 1 - 1 / world.size  # midway between 1, the mean of equal signs, and the next lower mean
        self.rehearses = False
        self._now: Settings = ()
        self._crc = 0
        self._signs: tuple[object, Tensor] | None = None  # cached while the settings stay the same
        self._on_its_way: tuple[Tensor, Any, _Held] | None = None

    def signs(self, like: Tensor) -> Tensor:
        """Return a checksum of this rank's values, as a tensor of 32 numbers that are 1 or -1."""
        now = self.settings()
        if now != self._now:
            self._now, self._crc = now, zlib.crc32(repr(now).encode())
        dtype = torch.promote_types(like.dtype, torch.float32)
        key = (self._crc, dtype, like.device)
        if self._signs is not None and has_streams(like.device) and is_captured():
            return self._signs[1]  # any value works: in a captured graph signs are not compared
        if self._signs is None or self._signs[0] != key:
            bits = (torch.tensor(self._crc) >> torch.arange(SIGNS)) & 1
            self._signs = key, (bits * 2 - 1).to(dtype).to(like.device)
        return self._signs[1]

    def compare(self, means: Tensor, seen: Seen | None = None) -> None:
        """Check that the ranks' checksums are equal, given their means. On a GPU, the next call checks."""
        if self.rehearses:
            return
        held = self._now, seen
        if not has_streams(means.device):
            now = means.tolist()
            if len(now) > SIGNS + 1 or not math.isfinite(now[0]) or min(map(abs, now[-SIGNS:])) <= self._alike:
                self._check(now, held)
            return
        if is_captured():
            return
        there = means.detach().to("cpu", non_blocking=True)
        event = torch.Event(means.device)
        event.record()
        self.finish()
        self._on_its_way = there, event, held

    def finish(self) -> None:
        """Check the checksums that were sent with the last loss, for example at the end of the program."""
        earlier, self._on_its_way = self._on_its_way, None
        if earlier is not None:
            earlier[1].synchronize()
            self._check(earlier[0].tolist(), earlier[2])

    def _check(self, means: list[float], held: _Held) -> None:
        seen, losses = held[1], self._losses
        if seen is not None and losses is not None:
            mean = means[0] if len(means) == SIGNS + 1 else means[0] / (means[1] or math.nan)
            if not math.isfinite(mean):
                losses.found(seen)
        if min(map(abs, means[-SIGNS:])) <= self._alike:
            self._explain(held[0])

    def _explain(self, settings: Settings) -> None:
        """Find out which values differ between the ranks, after their checksums differed."""
        held_by = collectives.gather_objects(settings)
        text = settings_differ(held_by) or diverged(held_by)
        if text:
            raise UsageError(text)


def held_alike(program: Program) -> Settings:
    """Return what must be equal on all ranks: optimizer settings and, at some backwards, a parameter sum."""
    found, count = settings_of(program.in_use), program.backwards - program.began
    return found if count < 2 or count & (count - 1) else found + sums_of(program)


def settings_of(optimizers: Iterable[Callable[[], Optimizer | None]]) -> Settings:
    """Return the settings of each optimizer, by parameter group."""
    found: list[tuple[str, str, Any]] = []
    for ref in optimizers:
        if (optimizer := ref()) is None:
            continue
        for place, group in enumerate(optimizer.param_groups):
            whose = f"group {place} of {type(optimizer).__name__}"
            for key, name in NAMES.items():
                if key in group:
                    value = group[key]
                    known = PLAIN.issuperset(map(type, value if type(value) is tuple else (value,)))
                    found.append((name, whose, value if known else _plain(value)))
    return tuple(found)


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.item() if value.device.type == "cpu" else None
    return tuple(map(_plain, value)) if isinstance(value, tuple | list) else value
