"""Check that all ranks gather the same blocks in one order.

Then no rank waits in a gather that the other ranks skip.

A rank asks the others only about an order that it has not seen before, so a step in a known order asks no other rank.
Only blocks that a forward might skip are checked (skipped.py).

Tested in tests/parallel/test_skipped.py.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from torch import nn

from meshwise.compat.dispatch import rehearsing
from meshwise.parallel.reduction import SKIPPED
from meshwise.spec.errors import PlanError
from meshwise.transfer import collectives
from meshwise.transfer.agreement import agree
from meshwise.transfer.reading import someone_is_past

FIRST = 1800.0  # seconds in which all ranks must come to the blocks of the first forward, which may compile
GRACE = 60.0  # seconds for an order that is new later: a rank with a known order does not say so


class GatherOrder:
    """Checks that all ranks gather the parameters of `blocks` in the same order. Otherwise, a rank could wait forever
    in a gather that other ranks skip. The check runs in hooks on the forwards of `root` and of the blocks, and raises
    PlanError if the orders differ.

    key: the prefix of the keys in the process group's store under which the ranks compare their orders.
    """

    def __init__(self, root: nn.Module, blocks: Sequence[nn.Module], key: str) -> None:
        names = {id(module): name for name, module in root.named_modules()}
        self._key, self._names = key, [names[id(block)] for block in blocks]
        self._known = set[int]()
        self._so_far = self._passed = self._asked = 0
        self._runs = self._met = False
        root.register_forward_pre_hook(self._begin, prepend=True)
        for number, block in enumerate(blocks):
            block.register_forward_pre_hook(functools.partial(self._come, number), prepend=True)
        root.register_forward_hook(self._end, prepend=True)

    def _begin(self, *unused: Any) -> None:
        self._runs, self._so_far, self._passed = not rehearsing(), 0, 0

    def _end(self, *unused: Any) -> None:
        if self._runs:
            self._come(-1)
        self._runs, self._met = False, True

    def _come(self, number: int, *unused: Any) -> None:
        """Check that all ranks are about to gather the same block in their forwards. The ranks communicate only if the
        sequence of blocks in this forward is new. A backward that recomputes a block is not checked, because it follows
        the sequence of the forward.

        number: the index of the block. -1 means the end of the forward.
        """
        if not self._runs:
            return
        self._so_far = hash((self._so_far, number))
        if self._so_far not in self._known:
            self._agree(f"calls block {self._names[number]}" if number >= 0 else "ends")
            self._known.add(self._so_far)
        self._passed += 1

    def _agree(self, what: str) -> None:
        self._asked += 1
        what = f"{what} after {self._passed} blocks"
        key, grace = f"{self._key}/{self._asked}", GRACE if self._met else FIRST
        other = agree(key, what, collectives.world_size(), grace, someone_is_past)
        if other is not None:
            others = f"the forward of another rank {other}" if other else "the forwards of other ranks do not"
            raise PlanError(
                f"shard: the forward of this rank {what}, but {others}. All ranks must run the same blocks "
                "in the same order. Put modules that a rank may skip into a list named experts, because a list of "
                f"this name is gathered with the whole model, or use data parallelism (shard=1). {SKIPPED}"
            )
