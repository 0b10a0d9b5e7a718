"""Detect values summed over ranks twice, and ratios of sums.

The source around the call shows them.

A sum of a sum returns its argument, with a note, if the ranks hold the same. A mean of the ranks' ratios gets a note.

Tested in tests/slips/test_slips.py.
"""

from __future__ import annotations

import ast
from collections.abc import Callable

from meshwise.slips.user_source import Source, asked, bare

TWICE = (
    "{place}: mw.sum of a value that mw.sum or mw.mean returned: it covers all ranks already, so mw.sum returns it "
    "unchanged. Sum once, in the loop or after it."
)
RATIO = (
    "{place}: mw.mean of a ratio of sums: each rank's ratio covers its own samples, and the mean of ratios is not the "
    "ratio over all samples. Write mw.sum(a) / mw.sum(b), or mw.mean(a / b, weight=b)."
)


def is_summed() -> bool:
    """Return whether the running call of `mw.sum` was given a value that is already reduced over the ranks, according
    to the user's source code."""
    return _asked(lambda source, value: _joined(source, value, ()) is True)


def is_ratio() -> bool:
    """Return whether the running call of `mw.mean` was given a ratio of sums, such as `loss.sum() / mask.sum()`,
    according to the user's source code."""
    return _asked(_ratio)


def _asked(question: Callable[[Source, ast.expr], bool]) -> bool:
    """Return `question(source, x)`, where `x` is the first argument of the meshwise call that the user's code is
    running. Return False if there is no source code."""
    return asked(lambda source, call: bool(call.args) and question(source, call.args[0]), False)


def _joined(source: Source, node: ast.expr, behind: tuple[str, ...]) -> bool | None:
    """Return True if a value was computed from results of `mw.sum` or `mw.mean`, and possibly from plain numbers."""
    node = bare(node)
    if isinstance(node, ast.Constant):
        return False
    if isinstance(node, ast.UnaryOp):
        return _joined(source, node.operand, behind)
    if isinstance(node, ast.BinOp):
        return _all_joined([_joined(source, each, behind) for each in (node.left, node.right)])
    if isinstance(node, ast.Call):
        zeros = isinstance(node.func, ast.Attribute) and node.func.attr == "zeros"
        return True if source.verb(node) in ("sum", "mean") else False if zeros else None
    if not isinstance(node, ast.Name):
        return None
    if node.id in behind:
        return False
    values = source.given_to(node.id)
    return _all_joined(
        [None if each is None else _joined(source, each, (*behind, node.id)) for each in values] or [None]
    )


def _all_joined(found: list[bool | None]) -> bool | None:
    return None if None in found else any(found)


def _ratio(source: Source, node: ast.expr) -> bool:
    node = bare(node)
    if isinstance(node, ast.Name):
        values = source.given_to(node.id)
        return (
            len(values) == 1
            and values[0] is not None
            and not isinstance(values[0], ast.Name)
            and _ratio(source, values[0])
        )
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Sub | ast.Mult):
        sides = [each for each in (node.left, node.right) if not isinstance(each, ast.Constant)]
        return len(sides) == 1 and _ratio(source, sides[0])
    divides = isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div)
    return divides and _has_sum(node.left) and _has_sum(node.right)  # type: ignore[attr-defined]


def _has_sum(node: ast.expr) -> bool:
    """Return whether an expression is made of sums over whole tensors, and possibly of plain numbers."""
    node = bare(node)
    if isinstance(node, ast.BinOp):
        sides = [each for each in (node.left, node.right) if not isinstance(each, ast.Constant)]
        return bool(sides) and all(map(_has_sum, sides))
    return (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "sum"
        and (not node.args and not node.keywords)
    )
