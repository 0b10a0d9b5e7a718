"""Find modules that torch.compile has wrapped, without importing the compiler.

Importing the compiler takes 4 s.

`OptimizedModule`, `_compiled_call_impl`, `cached_backends` and the environment variable are not public. Based on
torch 2.11, 2.13 and 2.15: `_dynamo/eval_frame.py`, `_dynamo/config.py`, `nn/modules/module.py`.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterable, Iterator
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

_passed_by: list[str] = []
SWITCH = "TORCH_COMPILE_DISABLE"


def unwrapped(module: nn.Module) -> nn.Module:
    """Return the module inside a torch.compile wrapper. Any other module is returned unchanged."""
    inner: Any = module
    while (frame := _frame()) is not None and isinstance(inner, frame.OptimizedModule):
        inner = inner._orig_mod
    return inner  # type: ignore[no-any-return]


def uncompile(model: nn.Module) -> bool:
    """Make all compiled modules in `model` run eagerly. Return whether there were any.

    A wrapper that `torch.compile(module)` returned stays in the model, and calls the original module."""
    frame, found = _frame(), False
    for module in model.modules() if frame is not None else ():
        changed: Any = module
        if unwrapped(module) is not module:
            changed.forward, found = changed._orig_mod.__call__, True
        elif changed._compiled_call_impl is not None:
            changed._compiled_call_impl, found = None, True
    return found


def is_used() -> bool:
    """Return whether this process has called torch.compile on anything, even if the compiled code has not run yet."""
    frame = _frame()
    return frame is not None and any(callable(backend) for backend in frame.cached_backends.values())


def pass_by(modules: Iterable[str]) -> None:
    """Tell torch.compile, if it is already imported, not to trace the code of these Python modules. Compiled code then
    has a graph break at each call into them. Changes a table in torch's `_dynamo/trace_rules.py` (checked in torch
    2.13)."""
    rules: Any = sys.modules.get("torch._dynamo.trace_rules")
    for name in modules if rules is not None and not _passed_by else ():
        rules.add(name)
        _passed_by.append(name)


@contextlib.contextmanager
def without_compiling() -> Iterator[None]:
    """Run compiled code eagerly in the block. A function that is called for the first time in the block may stay eager
    afterwards."""
    eager: Any = torch.compiler.set_stance("force_eager") if _frame() is not None else None
    with eager or patch.dict(os.environ, {SWITCH: "1"}):  # a compiler that is imported in the block reads this variable
        yield


def _frame() -> Any:
    return sys.modules.get("torch._dynamo.eval_frame")
