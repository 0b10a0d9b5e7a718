"""Warn when a model is called after its loop and draws.

The batch is the last one of the loop. Dropout on this rank's rows alone advances the program's random numbers
differently than dropout on the whole batch, so later epochs have another order.

Only the first forward of a model after each loop is checked, until the next loop begins. A batch that was changed
before it reaches the model is not recognized.

Tested in tests/guards/test_behind_loop.py.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from meshwise.compat import compiling
from meshwise.compat.dispatch import rehearsing
from meshwise.compat.tree import tensors_in
from meshwise.engine.engine import Engine
from meshwise.engine.loops import LoopRead
from meshwise.spec.user_code import user_place
from meshwise.transfer.checksum import sampled_sum

DRAWS = (
    "{place}: the model runs here after its loop, on this rank's part of the last batch, and draws random numbers "
    "(dropout) for this part alone. From here on, random numbers and the order of later epochs differ from those on "
    "one device. Call the model inside the loop, or in evaluation mode: model.eval()."
)


class BehindLoop:
    """Warns if a program calls a model on the last batch of a loop after the loop has ended, and the model draws random
    numbers. Each rank then draws numbers for its own samples only. All later random numbers differ from the random
    numbers on one device."""

    def __init__(self, engine: Engine) -> None:
        self._engine, self._program, self._say = engine, engine.program, engine.notify
        self._hooks: list[Any] = []
        self._batch = set[tuple[Any, ...]]()
        self._before: Tensor | None = None

    def batch_asked(self, loop: LoopRead) -> None:
        """Stop watching calls of the models if this is the first batch of a new loop."""
        if loop.given == 0:
            self.ends()

    def loop_ends(self, loop: LoopRead) -> None:
        """Begin to watch calls of the models, because a loop has ended or the program has left it."""
        batch = loop.batch
        if batch is None or self._engine.generator.nested or self._engine.stopped:
            return
        self.ends()
        if not compiling.is_used() and not rehearsing():
            self._batch = {_told(tensor) for tensor in tensors_in(batch)}
            self._hooks = [
                register_module_forward_pre_hook(self._enter),
                register_module_forward_hook(self._leave),
            ]

    def ends(self) -> None:
        """Stop checking, because a new loop begins or because there is nothing left to check."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def _enter(self, module: nn.Module, arguments: Any) -> None:
        if self._before is None and any(module is model for model in self._program.models):
            mine = any(_told(tensor) in self._batch - {()} for tensor in tensors_in(arguments))
            self._before = torch.get_rng_state() if mine else None

    def _leave(self, module: nn.Module, arguments: Any, output: Any) -> None:
        if self._before is None or not any(module is model for model in self._program.models):
            return
        if not torch.equal(self._before, torch.get_rng_state()):
            self._say(DRAWS.format(place=user_place()))
        self._before = None
        self.ends()


def _told(tensor: Tensor) -> tuple[Any, ...]:
    if tensor.layout != torch.strided or tensor.is_nested:
        return ()
    return tuple(tensor.shape), tensor.dtype, int(sampled_sum(tensor.detach()))


def watch(engine: Engine) -> None:
    """Add the guard `BehindLoop` to an engine that runs a script on several ranks. Do nothing for the engine of a job,
    or on one device."""
    if engine.script and engine.world.size > 1:
        behind = BehindLoop(engine)
        engine.events.listen(behind, batches=1)
        engine.ends.callback(behind.ends)
