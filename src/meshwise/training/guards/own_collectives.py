"""Report where a program that sees whole batches calls collectives itself.

In such a program, a value already covers all ranks, so a sum over ranks counts it several times.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import nn

from meshwise.parallel.splits.tensor import SplitTensor
from meshwise.parallel.splits.term import Term
from meshwise.spec.errors import UsageError
from meshwise.spec.user_code import OURS, is_users, user_place
from meshwise.torch_compat.program_calls import TORCH, put
from meshwise.torch_compat.tree import all_leaves
from meshwise.training.engine.engine import Engine

COLLECTIVES = """all_reduce all_gather all_gather_into_tensor all_gather_object reduce gather gather_object
reduce_scatter reduce_scatter_tensor all_to_all all_to_all_single"""
WHY = 'With view="whole" every number, loss and gradient of the program is that of the whole batch on each rank'
TWICE = "{place}: torch.distributed.{name} of the program. {why}: what it joins over {size} ranks counts {size} times."
KEPT = (
    "{kind} keeps torch.distributed.{name}. {why}: its sum counts {size} times. Build the model without it, such as "
    "with sync_codebook=False, or before torch.distributed begins."
)
SIZED = "{place}: asks for the number of ranks. {why}: do not multiply or divide by {size} what one device does not."


class OwnCollectives:
    """Reports, until the engine ends, where its program calls a collective of torch or asks for the number of ranks."""

    def __init__(self, engine: Engine, sized: list[str]) -> None:
        self._engine, self._sized = engine, sized
        self._theirs = {id(getattr(dist, name)): name for name in COLLECTIVES.split()}
        for name in (*COLLECTIVES.split(), "get_world_size"):
            engine.ends.callback(put([dist], name, functools.partial(_said, name, engine)))
        engine.ends.callback(put([dist], "is_initialized", _alone))

    def check(self, model: nn.Module) -> None:
        """Raise UsageError if a module stores a collective, which would get values that are already whole."""
        for module in model.modules():
            for name in (self._theirs[id(each)] for each in vars(module).values() if id(each) in self._theirs):
                kept = KEPT.format(kind=type(module).__name__, name=name, why=WHY, size=self._engine.world.size)
                raise UsageError(kept)

    def backward_begins(self, *_: Any) -> None:
        while self._sized:
            self._engine.notify(SIZED.format(place=self._sized.pop(), why=WHY, size=self._engine.world.size))


def _alone(function: Callable[[], bool]) -> Callable[[], bool]:
    """Make `is_initialized` return False to the program, or torchmetrics would sum whole values."""

    @functools.wraps(function)
    def is_initialized() -> bool:
        return not is_of_program(sys._getframe(1).f_code.co_filename) and function()

    return is_initialized


@functools.cache
def is_of_program(file: str) -> bool:
    """Return whether a file is program code: the user's or a package's, but not torch's or meshwise's."""
    return is_users(file) or (f"-packages{os.sep}" in file and not file.startswith((TORCH, OURS)))


def _said(name: str, engine: Engine, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        if is_users(sys._getframe(1).f_code.co_filename):
            values = {"place": user_place(), "name": name, "why": WHY, "size": engine.world.size}
            if any(isinstance(each, (SplitTensor, Term)) for each in all_leaves((args, kwargs))):
                raise UsageError(TWICE.format(**values) + " Remove the call.")
            engine.notify((SIZED if name == "get_world_size" else TWICE).format(**values))
        return function(*args, **kwargs)

    return called
