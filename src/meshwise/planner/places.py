"""Find the block and microbatch of an operator in a rehearsed step.

This works for operators of the forward and of the backward. Autograd numbers its nodes in the order of the forward. An
operator of a backward belongs to the block in which its node was created.
"""

from __future__ import annotations

import contextlib
import functools
from bisect import bisect_right
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from meshwise.parallel.blocks import blocks_of
from meshwise.reports.recorder import Mark, Recorder
from meshwise.reports.spans import stage_and_microbatch
from meshwise.training.autograd.loss_graph import next_node, node_under_way

_until: list[tuple[float, Callable[[], float]]] = []


class OutOfTime(BaseException):
    """Raised when the time for a search of plans is over. It is not an Exception, so that a program's `except
    Exception` does not catch it."""


@contextlib.contextmanager
def until(moment: float, clock: Callable[[], float]) -> Iterator[None]:
    """Within the context, raise OutOfTime when a forward, backward or optimizer step begins after the time `moment` of
    `clock`."""
    _until.append((moment, clock))
    try:
        yield
    finally:
        _until.pop()


class Places(Recorder):
    """A recorder that stores no spans, but tells to which block of the model and to which microbatch the running
    operator belongs. Call `follow(model)` before the model runs."""

    def __init__(self) -> None:
        super().__init__(on=False)
        self._microbatch: Callable[[], int] = lambda: -1
        self._name = self._inside = self._last = ""
        self._starts: list[int] = []  # the number of each `_blocks` entry's first autograd node
        self._blocks: list[str] = []

    def follow(self, model: nn.Module, microbatch: Callable[[], int]) -> None:
        """Register hooks on a model's blocks, so that `now` can tell which block is running."""
        self._microbatch = microbatch
        for name, block in blocks_of(model):
            block.register_forward_pre_hook(functools.partial(self._turns_to, name))
            block.register_forward_hook(functools.partial(self._turns_to, ""), always_call=True)

    def span(self, kind: str, name: str = "", **more: Any) -> Any:
        if kind in ("forward", "backward", "optimizer"):
            self._enters(kind, name)
        return super().span(kind, name, **more)

    def turn(self, phase: str, over: str = "", since: Mark | None = None) -> Mark:
        if phase in ("backward", "optimizer"):
            self._enters(phase, "")
        return super().turn(phase, over, since)

    def _enters(self, phase: str, name: str) -> None:
        if _until and _until[-1][1]() > _until[-1][0]:
            raise OutOfTime
        self._name = name
        self._inside = self._last = ""  # `pipeline.Leave` may end a forward inside a block without calling its hooks
        if phase == "optimizer":
            self._starts, self._blocks = [], []

    def now(self) -> tuple[str, int]:
        """Return the block and the microbatch of the operator that is running."""
        if self.phase not in ("forward", "backward"):
            return "", -1
        staged = stage_and_microbatch(self._name)
        return self._block(), self._microbatch() if staged is None else staged[1]

    def _block(self) -> str:
        if self._inside or self.phase == "forward":  # in a backward, `_inside` is set by recompute
            return self._inside
        node = node_under_way()
        if node is not None and node <= next_node():  # false for AccumulateGrad nodes, which have the highest number
            at = bisect_right(self._starts, node) - 1
            self._last = self._blocks[at] if at >= 0 else ""
        return self._last

    def _turns_to(self, name: str, *_: Any) -> None:
        self._inside = name
        self._starts.append(next_node())
        self._blocks.append(name)
