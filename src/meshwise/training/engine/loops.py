"""Track what this rank has read in a script's loops.

Sums over ranks depend on this record.
"""

from __future__ import annotations

from array import array
from collections import Counter
from dataclasses import dataclass, field

from meshwise.spec.errors import UsageError
from meshwise.spec.user_code import user_lines, user_place
from meshwise.spec.world import World
from meshwise.training.data.order import BatchSlice, divides_evenly


@dataclass(eq=False)
class LoopRead:
    """One loop over batches, and what this rank has read in it.

    loader: the number that identifies a script's loader.
    place: the user's source line.
    step: the number of the current step in a job; None in the loop of a script.
    given: how many batches the loop has yielded.
    over: True if the loop ran to its end. False while it runs, and if the program left it early.
    samples: the number of samples that this rank had, for each batch. It is 0 if the rank had only a padding sample.
    padded: whether any batch had fewer samples than there are ranks.
    part: this rank's slice of the current batch."""

    loader: int = 0
    place: str = ""
    step: int | None = None
    given: int = 0
    over: bool = False
    samples: array[int] = field(default_factory=lambda: array("q"))
    padded: bool = False
    part: BatchSlice | None = None
    earlier: BatchSlice | None = None
    """The slice of an earlier batch of another size in this loop, if no backward followed; or None."""


class Loops:
    """The open loops of a script. They may be nested, or advance together as by `zip`."""

    def __init__(self, world: World) -> None:
        self._world, self.ranks = world, world.size
        self._open: list[LoopRead] = []
        self.round: list[LoopRead] = []
        """The loops that have yielded a batch since the last backward."""
        self._weighed = False  # whether the last backward had a weight, and several loops had yielded a batch for it
        self.ended: LoopRead | None = None
        """The loop that ended last; None if a batch came later. If set, a value for `mw.sum` covers the whole loop."""
        self._places = Counter[object]()

    def is_elsewhere(self, loop: LoopRead) -> bool:
        """Return whether this is loop 1, 2, 4, 8 … at its source line, which listeners treat as new."""
        loop.place, place = user_place(), (user_lines(), loop.loader)
        self._places[place] += 1
        return self._places[place].bit_count() == 1

    def begin(self, part: BatchSlice, read: LoopRead) -> None:
        """Record that the loop `read` yields a batch. part: this rank's slice of the batch."""
        read.samples.append(part.samples)
        read.padded |= part.total < self.ranks
        before = read.part or part
        ahead = read in self.round and not self._weighed
        read.earlier = None if not ahead else before if before.total != part.total else read.earlier
        read.part = part
        if read in self._open:
            self._open.remove(read)
        self._open.append(read)
        self.round = [read] if self._weighed or read in self.round else [*self.round, read]
        self._weighed = False
        self.ended = None

    def end(self, read: LoopRead) -> BatchSlice | None:
        """Record that the loop `read` has ended, and return the slice of the loop around it."""
        for reads in (self._open, self.round):
            if read in reads:
                reads.remove(read)
        self.ended = read
        return self._open[-1].part if self._open else None

    def check_one_share(self, verb: str, *, weighed: bool) -> None:
        """Raise UsageError if it is not known over which batch a value is a mean."""
        backward = verb == "mw.backward"
        parts = [part for read in self.round for part in (read.earlier if backward else None, read.part) if part]
        padded = {min(part.total, self.ranks) for part in parts}
        shares = {None if divides_evenly(part.total, self._world) else part.total for part in parts}
        own = {(part.samples * parts[0].total, parts[0].samples * part.total) for part in parts}
        if len(padded) < 2 and (weighed or (len(shares) < 2 and all(a == b for a, b in own))):
            return
        sizes = " and ".join(str(part.total) for part in parts)
        raise UsageError(
            f"{user_place()}: {verb}: batches of {sizes} samples came, and the ranks' shares of them differ, so it is "
            f"unknown over which one this value is a mean. Call {verb} for each batch's own value, before the next one "
            "comes, or give this one weight=len(x) where each batch has a sample for each rank, or use batch sizes "
            "that the ranks divide, with drop_last=True."
        )

    def backward(self, *, weighed: bool) -> None:
        """Record that a backward has run."""
        self._weighed = weighed and len(self.round) > 1
        self.round = self.round if self._weighed else []
        self.ended = None if self._open else self.ended
