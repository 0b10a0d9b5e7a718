"""Compile the forward of each repeated layer, and nothing around it.

A graph over the whole model would include the points at which blocks are gathered, recomputed or moved. If each block's
forward is compiled separately, the compiler sees the code as the author wrote it. The model's class, hooks and
state_dict keys stay. Layers of one class share a graph, which is compiled once.
"""

from __future__ import annotations

import copy
import functools
import importlib.util
import os
import shutil
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from meshwise.parallel.blocks import blocks_of, repeated_blocks
from meshwise.parallel.splits.tensor import SplitTensor
from meshwise.parallel.technique import Setup, Technique
from meshwise.spec.devices import has_streams
from meshwise.spec.errors import PlanError
from meshwise.spec.words import some
from meshwise.torch_compat.compiling import unwrapped
from meshwise.torch_compat.modules import put_forward

BACKEND = "inductor"


def compile_blocks(model: nn.Module) -> list[str]:
    """Make torch compile the forward of each block of `model` at its first call. Return the blocks' names."""
    blocks = repeated_blocks(model) or blocks_of(model) or [("", model)]
    for _, block in blocks:
        for part in block.modules():
            if isinstance(part.forward, functools.partial):  # a wrapper that communicates: keep it out of the graph
                vars(part)["forward"] = torch.compiler.disable(part.forward)
        put_forward(block, _Compiled(block.forward))
    return [name or "the whole model" for name, _ in blocks]


class _Compiled:
    """A compiled forward. A deep copy of the module gets its own compiled forward."""

    def __init__(self, forward: Callable[..., Any]) -> None:
        self._forward = forward
        self._run = torch.compile(forward, backend=BACKEND)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # A compiled graph cannot take SplitTensors as inputs.
        split = any(isinstance(each, SplitTensor) for each in (*args, *kwargs.values()))
        return (self._forward if split else self._run)(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Compiled:
        return _Compiled(copy.deepcopy(self._forward, memo))

    def __reduce__(self) -> tuple[Any, ...]:
        return _Compiled, (self._forward,)


def check_can_compile(device: str) -> None:
    """Raise PlanError if triton or a C++ compiler is missing, which torch.compile needs to generate code for
    `device`."""
    if BACKEND != "inductor":
        return
    if has_streams(device) and importlib.util.find_spec("triton") is None:
        raise PlanError("compile=True on a GPU needs triton, which is missing. Install triton, or leave compile out.")
    name = os.environ.get("CXX") or "g++"
    if device.startswith("cpu") and shutil.which(name) is None:
        raise PlanError(
            f"compile=True on a CPU needs a C++ compiler, but '{name}' is not found. Install a compiler, set the "
            "environment variable CXX to one, or leave compile out."
        )


def _check_model(setup: Setup) -> None:
    check_can_compile(setup.world.device)


def _apply(setup: Setup) -> None:
    blocks = compile_blocks(unwrapped(setup.model))
    before = "torch.compile of the whole model is removed, and " if setup.was_compiled else ""
    setup.notes.append(f"compile: {before}each of {len(blocks)} blocks is compiled separately: {some(blocks)}.")


COMPILE = Technique(check_model=_check_model, apply=_apply)
