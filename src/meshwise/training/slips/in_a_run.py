"""Warn of counters that ranks or a resume change.

These are batch sizes divided by the number of ranks, epochs counted from 0, and counters and sums of a loop that
resumes inside an epoch. The source shows them.
"""

from __future__ import annotations

import ast
import linecache
import math
import re
import sys
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import Any

from torch import Tensor

from meshwise.spec.units import plural
from meshwise.spec.user_code import user_frame, user_place
from meshwise.spec.words import some
from meshwise.training.slips.user_source import Source, adds, given, loops_at, name_of, reads, sources_in

DIVIDED = (
    "{place}: this loader's batch_size is {whole} divided by the number of ranks, but for mw.distribute it is the "
    "batch size of all ranks together. Write batch_size={whole}."
)
COUNTED = (
    "{place}: the loop resumes with batch {batch} of its epoch, but enumerate counts from 0. If that number decides "
    "anything (accumulation, a break), write enumerate({inside}, {name}.start)."
)
BEGUN = (
    "{place}: the loop resumes with batch {batch} of its epoch, and {names} anew there. To cover the whole epoch, keep "
    "the values in a dict and pass it: mw.checkpoint(…, extra=state)."
)
UNREAD = (
    "{which} over in the restored state, but the program has not read saved.epoch. A loop over all epochs, such as "
    "range(4), trains {epochs} too many. Write for epoch in range(saved.epoch, …)."
)
RANKS = re.compile(r"(?i)world_size|device_count")
_ONLY_SHOWN = re.compile(r"^\s*(\w+\.)*(print|info|log)\(")


def says_divided() -> Iterator[str]:
    """Yield a warning for each loader of the user's file whose batch size is divided by the number of ranks."""
    if (frame := user_frame()) is None:
        return
    for source in sources_in(frame.f_code.co_filename, frame.f_globals):
        for call in source.calls():
            if not name_of(call).endswith("DataLoader"):
                continue
            sizes = [each.value for each in call.keywords if each.arg == "batch_size"] or call.args[1:2]
            for whole in [whole for size in sizes for whole in _dividends(source, source.value(size))][:1]:
                yield DIVIDED.format(place=source.place(call.lineno), whole=ast.unparse(whole))


def _dividends(source: Source, size: ast.expr) -> Iterator[ast.expr]:
    """Yield `n` if a size is `n // world_size`, or divided by another expression of the number of ranks."""
    nodes = [node for node in ast.walk(size) if isinstance(node, ast.BinOp)]
    rounded = any(isinstance(node.op, ast.Mult) for node in nodes)  # to a multiple
    for node in nodes if not rounded else ():
        if isinstance(node.op, ast.FloorDiv | ast.Div) and RANKS.search(ast.unparse(source.value(node.right))):
            yield node.left


class Asked:
    """Records whether a resumed program has read the epoch or step at which it resumes."""

    def __init__(self) -> None:
        self._read = False

    def note(self) -> None:
        """Record that the program reads the epoch or step. A line that only prints or logs it does not count."""
        if not self._read and (frame := user_frame(sys._getframe(1))) is not None:
            self._read = not _ONLY_SHOWN.match(linecache.getline(frame.f_code.co_filename, frame.f_lineno))

    def unread(self, epochs: int, extra: Any) -> str:
        """Return a warning if the resumed program has not read `epoch` of the object that `mw.checkpoint` returned."""
        counts = isinstance(extra, dict) and any(re.search("epoch|step", str(name).lower()) for name in extra)
        if self._read or not epochs or counts:
            return ""
        which = "epoch 1 is" if epochs == 1 else f"epochs 1 to {epochs} are"
        return UNREAD.format(which=which, epochs=plural(epochs, "epoch"))


def says_counted(start: int, kept: Sequence[Any] = ()) -> Iterator[str]:
    """Yield warnings if the user's loop resumes inside an epoch, after `start` batches (at least one), but counts its
    batches or sums its values from 0."""
    if (frame := user_frame()) is None:
        return
    at, values = {"place": user_place(frame), "batch": start + 1}, frame.f_globals | frame.f_locals
    for loop in loops_at(sources_in(frame.f_code.co_filename, frame.f_globals)[0].tree, frame.f_lineno):
        for inside, name in _counted(loop):
            yield COUNTED.format(**at, inside=inside, name=name)
        if begun := [name for name in _gathered(loop) if name in values and _is_empty(values[name], kept)]:
            yield BEGUN.format(**at, names=f"{some(begun)} {'begins' if len(begun) == 1 else 'begin'}")


def _is_empty(value: Any, kept: Sequence[Any]) -> bool:
    """Return whether a variable has a value with which a sum, a list or a search for the best value begins: 0, empty or
    infinite. Return False for restored objects, and True for values of unknown type."""
    if any(value is each for each in kept) or isinstance(value, ModuleType) or "tqdm" in str(type(value)):
        return False
    if isinstance(value, dict):
        return all(_is_empty(each, kept) for each in value.values())
    if isinstance(value, list | tuple | set | Tensor):
        return not (value.any() if isinstance(value, Tensor) else value)
    return value in (0, math.inf, -math.inf) if isinstance(value, int | float) else True


def _counted(loop: ast.For) -> Iterator[tuple[str, str]]:
    """Find the calls of `enumerate` over which a loop runs and that count from 0."""
    for call in ast.walk(loop.iter):
        if isinstance(call, ast.Call) and name_of(call) == "enumerate" and len(call.args) == 1 and not call.keywords:
            inside = name = call.args[0]
            while isinstance(name, ast.Call) and name.args:
                name = name.args[0]
            if isinstance(name, ast.Name | ast.Attribute):
                yield ast.unparse(inside), ast.unparse(name)


def _gathered(loop: ast.For) -> list[str]:
    """Return the names that the body of a loop adds to, by `t += x`, `t = 0.9 * t + x`, `losses.append(x)`,
    `d["loss"] += x` or `meter.update(x)`, and that it does not reset for each batch."""
    begun = {name for node in loop.body for name, value in given(node) if not reads(value, name)}
    found: dict[str, None] = {}
    for node in ast.walk(loop):
        call = node.value if isinstance(node, ast.Expr) else None
        holder: ast.AST | None = None
        if adds(node):
            holder = node.target.value if isinstance(node.target, ast.Subscript | ast.Attribute) else node.target
        elif isinstance(call, ast.Call) and call.args and isinstance(call.func, ast.Attribute):
            holder = call.func.value if call.func.attr in ("append", "extend", "update", "add") else None
        names = [holder.id] if isinstance(holder, ast.Name) else []
        found |= dict.fromkeys([*names, *(name for name, value in given(node) if reads(value, name))])
    return [name for name in found if name not in begun]
