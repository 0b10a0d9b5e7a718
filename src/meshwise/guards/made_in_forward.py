"""Reject parameters made inside a forward of a distributed model.

Each rank would draw different values.

Sums of such parameters are sent once with the signs of agreed.py, so that equal ones, as of a norm, raise no alarm.

Tested in tests/guards/test_made_in_forward.py.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from types import FrameType

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.nn.parameter import UninitializedParameter
from torch.utils.hooks import RemovableHandle

from meshwise.compat.dispatch import rehearsing
from meshwise.compat.modules import modules_called_around, parameters_in
from meshwise.engine.program import Program
from meshwise.guards.replicas import Settings
from meshwise.spec.user_code import user_place

MADE = "made in a forward"
MOST = 100  # parameters that are compared
OTHERS = (
    "{place}: this creates a {kind} inside a forward. Every rank has drawn its own {name}, so models differ. Create "
    "it before mw.distribute, in __init__. Run a lazy module once before mw.distribute."
)

Made = tuple[str, str, str, Tensor]
"""The user's source line, the name of the module's class, the name of the parameter, and the parameter."""


def note_made(program: Program, made: list[Made]) -> RemovableHandle:
    """From now on, append to `made` each parameter that is created inside a forward of the program's models."""
    return register_module_parameter_registration_hook(functools.partial(_registered, program, made, [0]))


def _registered(
    program: Program, made: list[Made], count: list[int], module: nn.Module, name: str, p: Tensor | None
) -> None:
    if p is None or isinstance(p, UninitializedParameter) or type(p) is not nn.Parameter or count[0] == MOST:
        return
    if isinstance(parameters_in(module).get(name), DTensor):  # shard puts it in for this forward
        return
    if _is_in_forward(program, sys._getframe(1)):
        count[0] += 1
        made.append((user_place(), type(module).__name__, name, p))


def _is_in_forward(program: Program, frame: FrameType | None) -> bool:
    """Return whether a module of the program's models is being called in the stack of `frame`."""
    called = list(modules_called_around(frame))
    return any(module is other for other in called for model in program.models for module in model.modules())


def sums_of_made(made: list[Made]) -> Settings:
    """Return the sum of the absolute values of each parameter in `made`, and clear `made`."""
    held = [] if rehearsing() else made  # tensors without values
    sums = [(f"{place}|{kind}|{name}", float(p.detach().abs().double().sum())) for place, kind, name, p in held]
    made.clear()
    return tuple((MADE, *each) for each in sums)


def made_differ(ranks: Sequence[Settings]) -> str:
    """Return a sentence if a forward has created a parameter with different values on two ranks."""
    for settings in ranks:
        for mine, other in zip(_made(settings), _made(ranks[0]), strict=False):
            if mine != other and mine[1] == other[1]:
                place, kind, name = mine[1].split("|")
                return OTHERS.format(place=place, kind=kind, name=name)
    return ""


def _made(settings: Settings) -> list[tuple[str, str, object]]:
    return [each for each in settings if each[0] == MADE]
