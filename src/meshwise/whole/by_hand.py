"""Find collectives that a program calls itself, though it sees whole batches."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from meshwise.compat.tree import all_leaves
from meshwise.engine.engine import Engine
from meshwise.process.session import sized
from meshwise.spec.errors import UsageError
from meshwise.spec.user_code import is_users, user_place
from meshwise.splits.tensor import SplitTensor
from meshwise.whole.term import Term

NAMES = """all_reduce all_gather all_gather_into_tensor all_gather_object reduce gather gather_object reduce_scatter
reduce_scatter_tensor all_to_all all_to_all_single"""
WHY = 'With view="whole" every number, loss and gradient of the program is that of the whole batch on each rank'
TWICE = "{place}: torch.distributed.{name} of the program. {why}: what it joins over {size} ranks counts {size} times."
SIZED = "{place}: asks for the number of ranks. {why}: do not multiply or divide by {size} what one device does not."


def begin(engine: Engine) -> Callable[[], None]:
    """Say from now on where the program calls a collective of torch. Return a function that ends this."""
    before = {name: getattr(dist, name) for name in (*NAMES.split(), "get_world_size")}
    for name, function in before.items():
        setattr(dist, name, _said(name, function, engine))

    def end() -> None:
        for name, function in before.items():
            setattr(dist, name, function)

    return end


def _said(name: str, function: Callable[..., Any], engine: Engine) -> Callable[..., Any]:
    text = SIZED if name == "get_world_size" else TWICE

    @functools.wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        if is_users(sys._getframe(1).f_code.co_filename):
            values = {"place": user_place(), "name": name, "why": WHY, "size": engine.world.size}
            if any(isinstance(each, (SplitTensor, Term)) for each in all_leaves((args, kwargs))):
                raise UsageError(TWICE.format(**values) + " Remove the call.")
            engine.notify(text.format(**values))
        return function(*args, **kwargs)

    return called


def say_sized(engine: Engine) -> None:
    """Say where the program has asked for the number of ranks by `mw.world_size`."""
    while sized:
        engine.notify(SIZED.format(place=sized.pop(), why=WHY, size=engine.world.size))
