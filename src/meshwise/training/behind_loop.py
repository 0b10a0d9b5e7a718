"""A model that is called behind its loop, on the batch that the loop gave last, and draws: dropout of this rank's rows
alone moves the program's random numbers elsewhere than that of the whole batch, and later epochs have another order.

Looked at in the first forward of a model behind each loop, until a loop begins. A batch that was changed on its way to
the model is not known again.

Tested in tests/training/test_behind_loop.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from meshwise.compat import compiling
from meshwise.compat.fake import rehearsing
from meshwise.compat.tree import tensors_in
from meshwise.spec.user_code import user_place
from meshwise.training.program import Program
from meshwise.transfer.checksum import sampled_sum

DRAWS = (
    "{place}: the model runs here behind its loop, on this rank's part of the last batch, and draws random numbers "
    "(dropout) for it alone: from here on the program's draws, and the order of later epochs, are others than on one "
    "device. Call it inside the loop, or in evaluation mode: model.eval()."
)


class BehindLoop:
    """Looks between the loops of a program. say: takes a sentence, once."""

    def __init__(self, program: Program, say: Callable[[str], None]) -> None:
        self._program, self._say = program, say
        self._hooks: list[Any] = []
        self._batch = set[tuple[Any, ...]]()
        self._before: Tensor | None = None

    def begins(self, batch: Any) -> None:
        """A loop is over, whose last batch was this."""
        self.ends()
        if not compiling.is_used() and not rehearsing():
            self._batch = {_told(tensor) for tensor in tensors_in(batch)}
            self._hooks = [
                register_module_forward_pre_hook(self._enter),
                register_module_forward_hook(self._leave),
            ]

    def ends(self) -> None:
        """A loop begins, or there is nothing more to look at."""
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
