"""Track what this rank has read in a script's loops.

Sums over ranks need it.

Tested in tests/script/test_over_ranks.py.
"""

from __future__ import annotations

from array import array
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from meshwise.data.order import BatchSlice, divides_evenly
from meshwise.spec.errors import UsageError
from meshwise.spec.user_code import user_lines, user_place
from meshwise.spec.world import World


@dataclass(eq=False)
class LoopRead:
    """One loop over batches, and what this rank has read in it.

    loader: the number of the loader in a script.
    place: the user's source line.
    step: in a job, the number of the step that the current batch belongs to.
    given: how many batches the loop has yielded.
    over: whether the loop has run to its end. False if the program left it early.
    samples: for each batch, how many samples this rank had. 0 if it had only a padding sample.
    padded: whether any batch had fewer samples than there are ranks.
    part: this rank's slice of the current batch.
    batch: the current batch; None after the loop."""

    loader: int = 0
    place: str = ""
    step: int | None = None
    given: int = 0
    over: bool = False
    samples: array[int] = field(default_factory=lambda: array("q"))
    padded: bool = False
    part: BatchSlice | None = None
    batch: Any = None
    uneven: bool = False
    """Whether this rank's share of the global batch was larger in one batch than in another."""
    earlier: BatchSlice | None = None
    """This rank's slice of another batch of a different size, which the loop also yielded since the last backward."""


@dataclass(eq=False)
class WholeRead:
    """What this rank has read in a loop over a loader that is not distributed.

    place: the user's source line.
    total: a sum of the values in all batches.
    compared: how often the ranks have compared such sums for this loop."""

    place: str
    batches: int = 0
    total: float = 0.0
    compared: int = 0


class Loops:
    """The loops of a script that have begun and not ended. They may be nested, or advance together as by `zip`."""

    def __init__(self, world: World) -> None:
        self._world, self.ranks = world, world.size
        self._open: list[LoopRead] = []
        self.round: list[LoopRead] = []
        """The loops that have yielded a batch since the last backward."""
        self._weighed = False  # that backward was weighed by the program, and of one of these
        self._alone: BatchSlice | None = None  # what the program has split itself, outside of loops
        self.ended: LoopRead | None = None
        """The newest loop, if it has ended and no batch came after it. A value then covers all batches of this loop."""
        self.by_place: dict[str, LoopRead] = {}
        """The newest program's finished loops by source line. A later loop at the same line replaces an earlier one."""
        self.over: Counter[tuple[str, int]] = Counter()
        """How many loops of the newest program have finished at each source line of the user."""
        self._places = Counter[object]()
        self.whole: WholeRead | None = None
        """The loop that yielded the newest batch, if the loader of that loop is not distributed; else None."""

    def is_elsewhere(self, loop: LoopRead) -> bool:
        """Return True for the first loop at this source line over this loader, and also for the second, fourth, eighth
        one and so on, because a program may change what it does in later epochs. Return False for all other loops."""
        loop.place, place = user_place(), (user_lines(), loop.loader)
        self._places[place] += 1
        return self._places[place].bit_count() == 1

    def begin(self, part: BatchSlice, read: LoopRead) -> None:
        """Record that the loop `read` yields a batch. part: this rank's slice of the batch."""
        read.samples.append(part.samples)
        read.padded |= part.total < self.ranks
        before = read.part or part
        read.uneven |= part.samples * before.total != before.samples * part.total
        ahead = read in self.round and not self._weighed
        read.earlier = None if not ahead else before if before.total != part.total else read.earlier
        read.part = part
        if read in self._open:
            self._open.remove(read)
        self._open.append(read)
        self.round = [read] if self._weighed or read in self.round else [*self.round, read]
        self._weighed = False
        self.ended = self.whole = None

    def split(self, part: BatchSlice) -> None:
        """Record that the program calls `mw.split` on a batch."""
        self._alone = None if self._open else part
        self.ended = self.whole = None

    def end(self, read: LoopRead) -> BatchSlice | None:
        """Record that the loop `read` has ended. Return this rank's slice of the batch that the program is working on
        now. This is the batch of the outer loop, or outside of loops the batch of the last `mw.split`. Return None if
        there is no such batch."""
        for reads in (self._open, self.round):
            if read in reads:
                reads.remove(read)
        self.ended = self.by_place[read.place] = read
        read.batch = None
        return self._open[-1].part if self._open else self._alone

    def check_one_share(self, verb: str, *, weighed: bool) -> None:
        """Raise UsageError if it is unclear which batch a value covers, and this rank has different shares of these
        batches.

        verb: the meshwise function that is called on the value.
        weighed: whether the program gave a weight for the value. If it did, different shares are allowed, unless the
        batches are padded differently."""
        backward = verb == "mw.backward"
        parts = [part for read in self.round for part in (read.earlier if backward else None, read.part) if part]
        padded = {min(part.total, self.ranks) for part in parts}
        shares = {None if divides_evenly(part.total, self._world) else part.total for part in parts}
        own = {(part.samples * parts[0].total, parts[0].samples * part.total) for part in parts}
        if len(padded) < 2 and (weighed or (len(shares) < 2 and all(a == b for a, b in own))):
            return
        sizes, loaders = " and ".join(str(part.total) for part in parts), len(self.round)
        one, given = ("loader", f"{loaders} loaders have") if loaders == len(parts) else ("batch", "one loader has")
        then = f"before the next {one} {'returns a batch' if one == 'loader' else 'comes'}. Or use drop_last=True."
        if len(padded) < 2:
            then = "and pass the number of its samples: weight=len(x). Or use batch sizes that "
            then += f"{self.ranks} divides, with drop_last=True."
        how = "own loss (inside mw.accumulate(), except for the last)" if backward else "own value"
        raise UsageError(
            f"{user_place()}: {verb}: {given} returned batches of {sizes} samples. The ranks have different shares of "
            f"these, so it is not known what this value is a mean over. Call {verb} for each {one}'s {how}, {then}"
        )

    def backward(self, *, weighed: bool) -> None:
        """Record a backward, so that later values belong to later batches. weighed: whether the program gave a weight
        for the loss. If it did, the next loss may be computed from the current batch of another loader."""
        self._weighed, self.whole = weighed and len(self.round) > 1, None
        self.round = self.round if self._weighed else []
        self.ended = None if self._open or self._alone is not None else self.ended
