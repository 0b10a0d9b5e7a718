"""Warn when a loop resumed inside an epoch counts from 0 again.

These are counters and sums that the program keeps.

The source shows them: the numbers of `enumerate(loader)`, and sums or lists that are empty as the loop begins.

Tested in tests/slips/test_resumed_loop.py.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import Any

from torch import Tensor

from meshwise.slips.user_source import adds, given, parsed, reads
from meshwise.spec.user_code import place, user_frame
from meshwise.spec.words import some


def says_counted(start: int, kept: Sequence[Any] = ()) -> Iterator[str]:
    """Yield warnings if the user's loop resumes inside an epoch, after `start` batches (at least one), but counts its
    batches or sums its values from 0.

    kept: the objects that were restored."""
    if (frame := user_frame()) is None:
        return
    file, line = frame.f_code.co_filename, frame.f_lineno
    tree = parsed(frame)
    at = f"{place(file, line)}: the loop resumes with batch {start + 1} of its epoch"
    for inside, name in _counted(tree, line):
        yield (
            f"{at}, but enumerate counts from 0. If that number decides anything (accumulation, a break), write "
            f"enumerate({inside}, {name}.start)."
        )
    values = frame.f_globals | frame.f_locals
    for loop in _loops(tree, line):
        found = dict.fromkeys([*_sums(loop), *_gathered(loop)])
        if begun := [name for name in found if name in values and _is_empty(values[name], kept)]:
            yield (
                f"{at}, and {some(begun)} {'begins' if len(begun) == 1 else 'begin'} anew there. "
                "To cover the whole epoch, keep the values in a dict and pass it: mw.checkpoint(…, extra=state)."
            )


def _is_empty(value: Any, kept: Sequence[Any]) -> bool:
    """Return whether a variable has a value with which a sum, a list or a search for the best value begins: 0, empty or
    infinite. Return False for objects that were restored, and True for values of unknown type.

    kept: the restored objects."""
    if any(value is each for each in kept) or isinstance(value, ModuleType) or "tqdm" in str(type(value)):
        return False
    if isinstance(value, list | tuple | set):
        return not value
    if isinstance(value, dict):
        return all(_is_empty(each, kept) for each in value.values())
    if isinstance(value, Tensor):
        return not value.any()
    return value in (0, math.inf, -math.inf) if isinstance(value, int | float) else True


def _counted(tree: ast.Module, line: int) -> Iterator[tuple[str, str]]:
    """Find the calls of `enumerate` in this line that count from 0."""
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and not node.keywords]
    for call in calls:
        here = call.lineno <= line <= (call.end_lineno or 0)
        if here and isinstance(call.func, ast.Name) and call.func.id == "enumerate" and len(call.args) == 1:
            inside = name = call.args[0]
            while isinstance(name, ast.Call) and name.args:
                name = name.args[0]
            if isinstance(name, ast.Name | ast.Attribute):
                yield ast.unparse(inside), ast.unparse(name)


def _loops(tree: ast.Module, line: int) -> Iterator[ast.For]:
    """Yield the `for` statements that have this line between the word `for` and the colon."""
    for node in ast.walk(tree):
        if isinstance(node, ast.For) and node.lineno <= line <= (node.iter.end_lineno or 0):
            yield node


def _sums(loop: ast.For) -> list[str]:
    """Return the names that the body of a loop adds to, by `t += x` or `t = 0.9 * t + x`, and does not reset for each
    batch."""
    nodes = [node for node in ast.walk(loop) if adds(node)]
    added = dict.fromkeys(node.target.id for node in nodes if isinstance(node.target, ast.Name))
    added |= dict.fromkeys(name for node in ast.walk(loop) for name, value in given(node) if reads(value, name))
    begun = {name for node in loop.body for name, value in given(node) if not reads(value, name)}
    return [name for name in added if name not in begun]


def _gathered(loop: ast.For) -> list[str]:
    """Return the names of objects that the body of a loop adds to, by `losses.append(x)`, `d["loss"] += x` or
    `meter.update(x)`."""
    found: dict[str, None] = {}
    begun = {name for node in loop.body for name, _ in given(node)}
    for node in ast.walk(loop):
        holder: ast.expr | None = None
        if adds(node) and isinstance(node.target, ast.Subscript | ast.Attribute):
            holder = node.target.value
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and node.value.args:
            function = node.value.func
            if isinstance(function, ast.Attribute) and function.attr in ("append", "extend", "update", "add"):
                holder = function.value
        if isinstance(holder, ast.Name) and holder.id not in begun:
            found[holder.id] = None
    return list(found)
