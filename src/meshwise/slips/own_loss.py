"""Warn when a rank's own loss is printed after `mw.backward(loss)`.

The same goes for a loss that is logged or compared, if the loss of the whole batch, which `mw.backward` returns, is not
used. The warning comes at the first backwards of that line.

It warns only if the source leaves no doubt, and the value is not summed over the ranks.

Tested in tests/slips/test_slips.py.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from meshwise.slips.counted_parts import JOINS, may_be_joined
from meshwise.slips.user_source import Source, adds, asked, bare, given, inside, name_of, reads

OWN = (
    "{place}: {name} is the loss of this rank's own samples here. Write {name} = {given}, which gives the "
    "loss of the whole batch, the same on every rank."
)


def says_own_loss() -> str:
    """Return a warning if the user's code, after the `mw.backward` call that is running, shows the loss of this rank
    alone. Return an empty string if it does not."""
    return asked(_said, "")


def _said(source: Source, call: ast.Call) -> str:
    name = _loss(call.args[0]) if call.args else ""
    kept = [value for node in inside(source.scope) for each, value in given(node) if each == name]
    if not name or any(each is call or source.verb(each) for value in kept for each in ast.walk(value)):
        return ""
    loss, whole = call.args[0], ast.unparse(call)
    if isinstance(loss, ast.BinOp) and isinstance(loss.op, ast.Div):
        whole = ast.unparse(ast.BinOp(call, ast.Mult(), loss.right))
    lines = [line for line in _shows(source, name) if line > call.lineno]
    return OWN.format(place=source.place(lines[0]), name=name, given=whole) if lines else ""


def _loss(node: ast.expr) -> str:
    """Return `loss` for the expressions `loss`, `scaler.scale(loss)` and `loss / 4`."""
    if isinstance(node, ast.BinOp):
        node = node.left
    if isinstance(node, ast.Call) and name_of(node) == "scale" and node.args:
        node = node.args[0]
    return node.id if isinstance(node, ast.Name) else ""


def _shows(source: Source, name: str) -> Iterator[int]:
    """Yield the numbers of the source lines that print, log or compare the value of a loss, or print or log a sum of
    losses."""
    sums = {
        node.target.id
        for node in inside(source.scope)
        if adds(node) and isinstance(node.target, ast.Name) and _is_number(node.value, name)
    }
    for node in sorted(inside(source.scope), key=lambda node: getattr(node, "lineno", 0)):
        if isinstance(node, ast.If | ast.While) and isinstance(node.test, ast.Compare):
            if any(_is_number(side, name) for side in (node.test.left, *node.test.comparators)):
                yield node.lineno
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and not _may_join(source, node.value):
            totals = [total for total in sums if reads(node.value, total)]
            shown = any(_is_shown(source, each, name) for each in ast.walk(node.value))
            if shown or any(not may_be_joined(source, ast.Name(total)) for total in totals):
                yield node.lineno


def _is_number(node: ast.expr, name: str) -> bool:
    """Return whether an expression is the value of the tensor `name`, such as `loss.item()`, `float(loss)` or `loss`
    itself."""
    node = bare(node)
    return isinstance(node, ast.Name) and node.id == name


def _is_shown(source: Source, node: ast.AST, name: str) -> bool:
    """Return whether the value of a loss is passed to a call, or formatted in a string."""
    if isinstance(node, ast.FormattedValue):
        return _is_number(node.value, name)
    if not isinstance(node, ast.Call) or source.verb(node) == "backward":
        return False
    given_to = [*node.args, *(keyword.value for keyword in node.keywords)]
    return any(_is_number(each, name) and isinstance(each, ast.Call) for each in given_to)


def _may_join(source: Source, call: ast.Call) -> bool:
    """Return False for a call that just shows a value, such as `print(loss)`."""
    functions = {n.name for n in ast.walk(source.tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)}
    called = [name_of(each) for each in ast.walk(call) if isinstance(each, ast.Call)]
    names = [each.id for each in ast.walk(call) if isinstance(each, ast.Name)]
    kept = ("append", "extend", "update", "add", "push", "put", "backward", "all_reduce")
    return (
        any(each in functions or each in kept for each in called)
        or any(word in each.lower() for each in called for word in JOINS)
        or any("rank" in each.lower() for each in (*called, *names))
    )
