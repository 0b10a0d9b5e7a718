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

from meshwise.compat.fake import rehearsing
from meshwise.parallel.reduction import SKIPPED
from meshwise.spec.errors import PlanError
from meshwise.transfer import collectives
from meshwise.transfer.agreement import agree
from meshwise.transfer.reading import someone_is_past

FIRST = 1800.0  # seconds in which all ranks must come to the blocks of the first forward, which may compile
GRACE = 60.0  # seconds for an order that is new later: a rank with a known order does not say so


class GatherOrder:
    """Checks that all ranks run `blocks` in the same order. It does so by hooks on the forwards of `root` and of the
    blocks.

    key: a prefix for keys in the process group's store. With these keys the ranks compare their orders.
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
        """Note that a forward is about to gather a block. Blocks that a backward recomputes are not noted, because
        their order is the same on all ranks."""
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
                f"shard: the forward of this rank {what}, but {others}. All ranks gather a block together, but a rank "
                "has skipped one. Put modules that a rank may skip into a list named experts, because a list of this "
                f"name is gathered with the whole model, or use data (shard=1). {SKIPPED}"
            )
