"""Report a script's losses that are not finite.

The first such loss is reported, all are counted, and a program whose last loss is not finite fails.

The guard adds no reads from the device: on several ranks, the mean loss comes with the signs of agreed.py; on one
device, losses wait for the next check.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from meshwise.spec.devices import has_streams
from meshwise.spec.errors import LossError
from meshwise.spec.words import ranks_text, some
from meshwise.torch_compat.dispatch import rehearsing
from meshwise.training.data.order import BatchSlice
from meshwise.training.engine.engine import Engine, Seen
from meshwise.transfer import collectives

SHOWN = 4  # how many samples a message names
FIRST = (
    "step {step}: the loss{whose} is {what}. The run continues, but its parameters are lost unless the program, or its "
    "GradScaler, skips such a step. Lower the learning rate, clip gradients, or look at these samples."
)


class FiniteLosses:
    """Checks whether the losses of a program are finite."""

    def __init__(self, engine: Engine) -> None:
        self._engine, self._program, self._say = engine, engine.program, engine.notify
        self._waiting: list[Seen] = []  # losses that the next `look` checks
        self._on_its_way: tuple[Tensor, torch.Event | None, list[Seen]] | None = None
        self._count = self._first = self._last = 0  # number of bad losses, step of the first, backward of the last
        self._began, self._wrong = 0, ""  # number of backwards in earlier programs, and an error text from them
        self._ended = False

    def look(self) -> None:
        """Check the losses that have not been checked yet."""
        waiting, self._waiting = self._waiting, []
        earlier, self._on_its_way = self._on_its_way, None
        if waiting and not rehearsing():
            fine = torch.stack([torch.as_tensor(own).reshape(()).isfinite() for _, _, _, own in waiting])
            if has_streams(fine.device):
                there, event = fine.to("cpu", non_blocking=True), torch.Event(fine.device)
                event.record()
                self._on_its_way = there, event, waiting
            else:
                earlier = fine, None, waiting
        if earlier is None:
            return
        if earlier[1] is not None:
            earlier[1].synchronize()
        for is_fine, seen in zip(earlier[0].tolist(), earlier[2], strict=True):
            if not is_fine:
                self.found(seen)

    def found(self, seen: Seen) -> None:
        """Count a loss whose mean over the ranks is not finite. Report the first."""
        number, step, part, own = seen
        self._count, self._last = self._count + 1, number
        if self._count > 1:
            return
        self._first, value = step, float(own)
        mine = "" if math.isfinite(value) else f"{value}{_samples(part)}"
        several = self._program.world.size > 1
        told = (collectives.get_rank(collectives.everyone()), mine)
        bad = [(rank, text) for rank, text in (collectives.gather_objects(told) if several else [told]) if text]
        whose = f" of {ranks_text([rank for rank, _ in bad])}" if bad and several else ""
        self._say(FIRST.format(step=step, whose=whose, what=bad[0][1] if bad else "not finite over all ranks"))

    def backward_ends(self, mean: Tensor | float | None, own: Tensor | float | None) -> None:
        """Keep the loss until the next call of `look`, which checks it."""
        if mean is not None and not (isinstance(mean, float) and math.isfinite(mean)):
            self._waiting.append((self._program.backwards, self._engine.phases.number, self._engine.part, mean))

    def program_begins(self) -> None:
        """Begin to watch another program in the same process."""
        self._wrong = self._conclude() or self._wrong
        self._began, self._count = self._program.backwards, 0

    def program_ends(self) -> None:
        """Raise LossError if the last loss of the program, or of an earlier program, is not finite."""
        ended, self._ended = self._ended, True
        if not ended and (text := self._conclude() or self._wrong):
            raise LossError(text)

    def _conclude(self) -> str:
        """Return an error text if the last loss is not finite. Otherwise report earlier losses that were not."""
        self.look()
        self.look()
        backwards = self._program.backwards
        how = f"{self._count} of {backwards - self._began} losses were not finite, the first in step {self._first}"
        if self._count and self._last == backwards:
            return f"the program has ended, and its last loss is not finite. {how}"
        if self._count:
            self._say(f"{how}; the last one is finite.")
        return ""


def _samples(part: BatchSlice | None) -> str:
    """Return a text that names the samples in a batch, such as ` (samples 3, 9, 12, 40 and 4 more)`."""
    if part is None or not part.samples:
        return ""
    return f" (samples {some(list(map(str, part.indices[: part.samples].tolist())), SHOWN)})"
