"""Supply values to calls that run on one rank's rows."""

from __future__ import annotations

import functools
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from meshwise.parallel.splits.rows_axis import DataAxis
from meshwise.torch_compat.modules import parameters_in
from meshwise.torch_compat.torch_function import is_asked
from meshwise.training.whole.proof import ASKED, Verdict

looked_at = weakref.WeakSet[nn.Module]()
"""The modules in which registrations are counted. A slice of a ModuleList is a new module and not counted."""
registered = [0]
"""How often a module in `looked_at` got a submodule or a parameter."""


class Otherwise(Exception):
    """Raised if a call that runs apart behaves differently than when it was proven."""


class Reads:
    """Answers the reads of a call that runs apart. Raises Otherwise if an answer differs from the call's proof."""

    def __init__(self, verdict: Verdict, axis: DataAxis) -> None:
        self._verdict, self._axis, self._at = verdict, axis, 0

    def read(self, name: str, tensor: Tensor, original: Callable[[], Any]) -> Any:
        """Return the value of a tensor that the call reads by the method `name`."""
        answers = self._verdict.answers
        if not answers or name not in ASKED or tensor.dtype is not torch.bool:
            if self._verdict.reads:
                return original()
            raise Otherwise(f"it reads a value ({name})")
        if self._at == len(answers):
            raise Otherwise(f"it reads a value ({name})")
        op, expected = answers[self._at]
        apart.reads = None
        try:
            answer = original() if op is None else self._axis.agreed(original(), op)
        finally:
            apart.reads = self
        if answer != expected:
            raise Otherwise((*answers[: self._at], (op, answer)))
        self._at += 1
        return answer


class _Apart(threading.local):
    reads: Reads | None = None


apart = _Apart()
"""`reads` answers the reads of the call that runs apart in this thread."""


@functools.cache
def watch_reads() -> None:
    """From now on, answer the reads of calls that run apart, and count what modules register."""

    def registers(module: nn.Module, name: str, _: Any) -> None:
        is_new = parameters_in(module).get(name) is None  # false when FSDP swaps a parameter's shard and whole value
        registered[0] += is_new and module in looked_at

    register_module_module_registration_hook(registers)
    register_module_parameter_registration_hook(registers)
    for name in ("item", "__bool__", "__float__", "__int__", "__index__", "tolist", "numpy"):
        setattr(Tensor, name, _answered(getattr(Tensor, name), name))


def ask_all_of_masks() -> None:
    """Let transformers test a mask with `Tensor.all`, not by comparing sums."""
    masks: Any = sys.modules.get("transformers.masking_utils")
    if masks is not None and hasattr(masks, "fast_all"):
        masks.fast_all = Tensor.all


def _answered(original: Callable[..., Any], name: str) -> Callable[..., Any]:
    def read(self: Tensor, *args: Any, **kwargs: Any) -> Any:
        if apart.reads is not None and is_asked():  # not inside `on_parts`: those reads are meshwise's own
            return apart.reads.read(name, self, lambda: original(self, *args, **kwargs))
        return original(self, *args, **kwargs)

    read.__name__ = name
    return read
