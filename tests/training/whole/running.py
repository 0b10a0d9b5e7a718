"""Runs a program as it stands on one device, or with the whole view on several, and compares what both leave."""

from __future__ import annotations

import inspect
import math
import random
from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

import numpy as np
import torch

import meshwise as mw
from tests.training.whole import (
    programs_batches,
    programs_contrasts,
    programs_loops,
    programs_losses,
    programs_models,
    programs_strangers,
    switches,
)

Program = Callable[..., Any]


def programs_of(*modules: ModuleType) -> dict[str, Program]:
    """The functions that take `distribute` and nothing else, by name."""
    found = [f for module in modules for f in vars(module).values() if inspect.isfunction(f)]
    return {f.__name__: f for f in found if [*inspect.signature(f).parameters] == ["distribute"]}


PROGRAMS = programs_of(
    programs_loops, programs_batches, programs_losses, programs_contrasts, programs_models, programs_strangers
)
SWITCHES = programs_of(switches)


def untouched(*things: Any) -> Any:
    """What the script without our line has."""
    return things if len(things) > 1 else things[0]


def run(program: Program, distribute: Callable[..., Any] = untouched) -> Any:
    """What a program leaves, in float64, from fixed random numbers."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    np.random.seed(0)
    random.seed(0)
    try:
        return program(distribute)
    finally:
        torch.set_default_dtype(before)


def whole(program: Program) -> Any:
    """The same on a rank that sees whole batches."""
    return run(program, partial(mw.distribute, view="whole"))


def apart(got: Any, want: Any, at: str = "") -> tuple[float, str]:
    """The largest difference, relative above one, and where it is; infinite where a kind or size differs."""
    if type(got) is not type(want) or (isinstance(want, list | tuple | dict) and len(got) != len(want)):
        return math.inf, f"{at}: {got!r:.80} for {want!r:.80}"
    if isinstance(want, list | tuple):
        return max(
            (apart(*pair, f"{at}[{n}]") for n, pair in enumerate(zip(got, want, strict=True))), default=(0.0, at)
        )
    if isinstance(want, dict):
        return max((apart(got.get(key), value, f"{at}.{key}") for key, value in want.items()), default=(0.0, at))
    if isinstance(want, str):
        return (0.0 if got == want else math.inf), f"{at}: {got!r} for {want!r}"
    got, want = (torch.as_tensor(value, dtype=torch.float64) for value in (got, want))
    if got.shape != want.shape:
        return math.inf, f"{at}: {got.shape} for {want.shape}"
    far = ((got - want).abs() / want.abs().clamp(min=1)).nan_to_num(nan=math.inf)
    return float(far.max()) if far.numel() else 0.0, at
