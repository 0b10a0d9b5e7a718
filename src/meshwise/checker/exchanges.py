"""Record a program's own collectives, and reads of unfinished buffers.

Collectives that meshwise itself calls while the program runs do not count. In a perturbed check, the buffer that a
collective or a point-to-point transfer writes holds NaN until it has ended.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from types import FrameType
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import FunctionCtx

from meshwise.spec.user_code import is_users, place, user_place
from meshwise.spec.words import some
from meshwise.torch_compat.dispatch import gives_view, intercept_operators, operator_name
from meshwise.torch_compat.perturbed import open_exchanges
from meshwise.torch_compat.program_calls import TORCH
from meshwise.torch_compat.tree import tensors_in

DISTRIBUTED = TORCH + "distributed" + os.sep
NAMESPACES = ("c10d", "_c10d_functional")
SUMS = ("allreduce", "all_reduce", "reduce_scatter", "reduce")


class Exchange(NamedTuple):
    """A collective that the program itself calls."""

    module: str
    place: str
    operator: str
    function: str
    ranks: tuple[int, ...]

    @property
    def adds_up(self) -> bool:
        """Whether the collective is a sum over ranks."""
        return self.operator.startswith(SUMS)

    @property
    def line(self) -> str:
        """Where the program calls it, and its names: `train.py:31 (all_reduce in Sum)`."""
        return f"{self.place} ({self.operator}{f' in {self.function}' if self.function else ''})"


Exchanges = dict[Exchange, None]
"""The collectives in the order of their calls. The values of the dict are unused."""


def places_of(exchanges: Iterable[Exchange]) -> str:
    """Return the lines that call these collectives, as a text."""
    return some(dict.fromkeys(each.line for each in exchanges))


def noting_exchanges(found: Exchanges, module: Callable[[], str]) -> AbstractContextManager[Any]:
    """Add to `found` each collective that the program itself calls inside the with block."""

    def note(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        frame, ranks = _by_hand() if operator.namespace in NAMESPACES else (None, ())
        if frame is not None:
            where, name = place(frame.f_code.co_filename, frame.f_lineno), operator_name(operator).strip("_")
            found[Exchange(module(), where, name, _function(frame), ranks)] = None
        return operator(*args, **kwargs)

    return intercept_operators(note)


def _by_hand() -> tuple[FrameType | None, tuple[int, ...]]:
    """Return the user's frame that called torch.distributed, and the ranks of its process group."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not frame.f_code.co_filename.startswith(DISTRIBUTED):
        frame = frame.f_back
    groups = list[Any]()
    while frame is not None and frame.f_code.co_filename.startswith(TORCH):
        groups += [frame.f_locals["group"]] if "group" in frame.f_locals else []
        frame = frame.f_back
    if frame is None or not is_users(frame.f_code.co_filename):
        return None, ()
    known = groups and (groups[0] is None or isinstance(groups[0], dist.ProcessGroup))
    return frame, tuple(sorted(dist.get_process_group_ranks(groups[0]))) if known else ()


def _function(frame: FrameType | None) -> str:
    """Return the name of the torch.autograd.Function whose forward or backward called the code of `frame`."""
    while frame is not None and is_users(frame.f_code.co_filename):
        first = frame.f_code.co_varnames[:1]
        if first and isinstance(frame.f_locals.get(first[0]), FunctionCtx):
            return frame.f_code.co_qualname.rpartition(".")[0]
        frame = frame.f_back
    return ""


UNREAD = ("fill_", "empty", "new_empty", "empty_like", "empty_strided", "copy_")
"""Operators that compute nothing, but copy, fill or allocate memory. NaN in their result is ignored."""


def noting_nan(found: list[str], perturbed: bool) -> AbstractContextManager[Any]:
    """Add to `found` the first operator that reads a buffer before an exchange wrote it."""

    def note(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result, name = operator(*args, **kwargs), operator_name(operator)
        under_way = [] if found or name in UNREAD or gives_view(operator) else open_exchanges()
        if under_way and any(is_nan(tensor) for tensor in tensors_in(result)):
            say_nan(found, f"{name} at {user_place() or 'meshwise'} computed with", under_way)
        return result

    return intercept_operators(note) if perturbed else nullcontext()


def say_nan(found: list[str], what: str, under_way: list[str]) -> None:
    """Append to `found` a sentence that names the exchanges in flight when a value was NaN."""
    found.append(f"the program had not waited for {some(under_way)} when {what} its output")


def is_nan(tensor: Tensor) -> bool:
    """Return whether a tensor contains NaN."""
    return tensor.is_floating_point() and bool(tensor.detach().isnan().any())
