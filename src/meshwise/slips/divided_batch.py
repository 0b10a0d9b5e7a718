"""Warn of a batch size divided by the number of ranks.

DistributedDataParallel wants the batch size per rank; meshwise wants that of all ranks together. The warning comes if
the source shows the division and the numbers agree.

Tested in tests/slips/test_slips.py.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import replace

from meshwise.slips.user_source import Source, call_in, inside, name_of, source_of
from meshwise.spec.user_code import user_frame

DIVIDED = (
    "{place}: this loader's batch_size, {size}, is {whole} divided by the number of ranks, but for mw.distribute "
    "it is the batch size of all ranks together: each of {ranks} ranks would get {part}. Write batch_size={whole}."
)
COUNTS = {"world_size", "get_world_size", "device_count"}
DEEP = 3  # names behind names


def says_divided(size: int | None, ranks: int) -> str:
    """Return a warning if the program has divided the batch size of a loader by the number of ranks before it gives the
    loader to `mw.distribute`. Return an empty string otherwise.

    size: the batch size of the loader."""
    frame = user_frame()
    if frame is None or size is None:
        return ""
    source = source_of(frame)
    running = call_in(frame, source.tree)
    for call, at in [found for node in running.args for found in _loaders(source, node, DEEP)] if running else ():
        given = [each.value for each in call.keywords if each.arg == "batch_size"] or call.args[1:2]
        for dividend in _dividends(at, given[0], DEEP) if given else ():
            whole = at.number(dividend)
            if whole is not None and whole != size and size in (whole // ranks, max(1, whole // ranks)):
                where = source.place(call.lineno)
                part = f"{size // ranks}" if size % ranks == 0 else f"about {size / ranks:.1f}"
                return DIVIDED.format(place=where, size=size, whole=whole, ranks=ranks, part=part)
    return ""


def _loaders(source: Source, node: ast.expr, deep: int) -> Iterator[tuple[ast.Call, Source]]:
    """Find where a loader was created."""
    if isinstance(node, ast.Name) and deep:
        for value in source.given_to(node.id):
            yield from _loaders(source, value, deep - 1) if value is not None else ()
    elif isinstance(node, ast.Call) and name_of(node).endswith("DataLoader"):
        yield node, source
    elif isinstance(node, ast.Call) and deep:
        for function in ast.walk(source.tree):
            if isinstance(function, ast.FunctionDef) and function.name == name_of(node):
                at = replace(source, scope=function, values={})
                for each in inside(function):
                    if isinstance(each, ast.Call) and name_of(each).endswith("DataLoader"):
                        yield each, at


def _dividends(source: Source, node: ast.expr, deep: int) -> Iterator[ast.expr]:
    """Yield the expression `n` if the value of `node` is computed as `n // world_size`, or by another division by the
    number of ranks."""
    if (
        isinstance(node, ast.BinOp)
        and isinstance(node.op, ast.FloorDiv | ast.Div)
        and _counts(source, node.right, deep)
    ):
        yield node.left
    elif isinstance(node, ast.Call) and name_of(node) in ("int", "max", "round"):
        for each in node.args:
            yield from _dividends(source, each, deep)
    elif isinstance(node, ast.Name) and deep:
        values = source.given_to(node.id)
        if len(values) == 1 and values[0] is not None:
            yield from _dividends(source, values[0], deep - 1)


def _counts(source: Source, node: ast.expr, deep: int) -> bool:
    """Return whether the value of an expression is the number of ranks."""
    if isinstance(node, ast.Name) and deep:
        values = source.given_to(node.id)
        return len(values) == 1 and values[0] is not None and _counts(source, values[0], deep - 1)
    called = {name_of(each) for each in ast.walk(node) if isinstance(each, ast.Call)}
    return bool(called & COUNTS) or any(
        isinstance(each, ast.Constant) and each.value == "WORLD_SIZE" for each in ast.walk(node)
    )
