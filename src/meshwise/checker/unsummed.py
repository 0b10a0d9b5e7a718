"""Find evaluation loops that never reduce across ranks.

After such a loop, each rank of a per-rank program has results for its own samples only.

An evaluation is a loop over a distributed loader that has no backward and runs a distributed model in its first batch.
A `mw.sum`, `mw.mean` or `mw.gather_samples` may still come after the loop, so the loop is reported only when the next
loop at another place begins, or the program ends. Not reported are loops whose results the program reduces with
torch.distributed, loops before a training (they may prepare it), loops that are left after one batch, and `update_bn`.
Models that use torch.compile get no hook: their loops run a model if gradients are off or a model is in evaluation
mode.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook

from meshwise.spec.user_code import frame_in
from meshwise.torch_compat import compiling
from meshwise.training.engine.engine import Engine
from meshwise.training.engine.loops import LoopRead
from meshwise.transfer.traced import Foreign

OF_STATISTICS = "torch/optim/swa_utils.py"
"""The file of torch with `update_bn`, which runs a model for its batch norms alone."""


@dataclass(eq=False)
class Loop:
    """A loop that may be an evaluation."""

    place: str
    backwards: int
    prepares: bool
    foreign: Foreign
    ran: bool = False
    unhook: Callable[[], None] = lambda: None


class UnsummedLoops:
    """Finds evaluations whose results are never summed over the ranks."""

    def __init__(self, engine: Engine, found: Callable[[str], None]) -> None:
        """found: receives the place of each such evaluation."""
        self._program, self._found = engine.program, found
        self._open: dict[LoopRead, Loop] = {}
        self._waiting: list[Loop] = []

    def batch_asked(self, read: LoopRead) -> None:
        """Watch a loop from its first batch to its second."""
        if read.given == 1 and read in self._open:
            self._open[read].unhook()
            if self._open[read].backwards != self._program.backwards:  # a backward ran, so the loop trains
                self._open.pop(read).foreign.close()
        if read.given:
            return
        program = self._program
        self._say(lambda loop: loop.place != read.place and not loop.prepares)
        loop = Loop(read.place, program.backwards, program.backwards == program.began, Foreign())
        self._open[read] = loop
        if compiling.is_used():
            loop.ran = not torch.is_grad_enabled() or any(not model.training for model in program.models)
        else:
            modules = {module for model in program.models for module in model.modules()}
            loop.unhook = register_module_forward_hook(partial(_ran, loop, modules)).remove

    def loop_ends(self, read: LoopRead) -> None:
        """Keep a loop that was an evaluation, until no sum can follow."""
        if (loop := self._open.pop(read, None)) is None:
            return
        loop.unhook()
        is_evaluation = loop.ran and loop.backwards == self._program.backwards and (read.over or read.given > 1)
        if not loop.foreign.close() and is_evaluation:
            loop.foreign = Foreign()
            self._waiting.append(loop)

    def joined(self, value: object) -> None:
        """Forget all loops up to now: the program has reduced values, maybe theirs."""
        for loop in (*self._open.values(), *self._waiting):
            loop.unhook()
            loop.foreign.close()
        self._open.clear()
        self._waiting.clear()

    def program_begins(self) -> None:
        """Warn of loops in this process's previous program whose results were never summed."""
        self._say(lambda loop: not loop.prepares)

    def evaluations_end(self) -> None:
        """At the end of the program, warn of loops whose results were never summed."""
        trained = self._program.backwards > self._program.began
        self._say(lambda loop: not (loop.prepares and trained))

    def _say(self, which: Callable[[Loop], bool]) -> None:
        for loop in [loop for loop in self._waiting if which(loop)]:
            self._waiting.remove(loop)
            if not loop.foreign.close():
                self._found(loop.place)


def _ran(loop: Loop, modules: set[nn.Module], module: nn.Module, arguments: Any, output: Any) -> None:
    loop.ran |= module in modules and frame_in(OF_STATISTICS) is None
