"""Find mistakes in the source of programs with the per-rank view.

Such a program sees only its rank's samples, and may mistake a loss of them for one of all samples.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator

from meshwise.training.slips.user_source import FUNCTIONS, Source, inside, name_of, sources_in

OWN = "{name} is the loss of this rank's own samples here. Write {name} = {given}, the loss of the whole batch."
JOINS = ("reduce", "gather", "sync", "sum", "mean", "average", "append", "extend", "update", "add", "push", "put")
"""Parts of the names of functions that reduce a value over the ranks, or keep it for later."""
PLAIN = {"item", "float", "double", "long", "int", "cpu", "clone", "detach", "to", "tolist", "tensor", "as_tensor"}
"""Functions and methods that convert a tensor or a number, but keep its value."""


def slips_in(files: Iterable[str]) -> list[str]:
    """Return a sentence for each mistake in the source of these files."""
    found = dict[str, None]()
    for source in (source for file in files for source in sources_in(file)):
        found |= dict.fromkeys(_own_losses(source))
    return list(found)


def _own_losses(source: Source) -> Iterator[str]:
    """Find losses of this rank that are used in place of what mw.backward returns."""
    for call in (call for call in source.calls() if source.verb(call) == "backward"):
        if name := _own_loss(source, call):
            divisor = _divisor(call.args[0])
            whole = ast.unparse(call) + ("" if divisor == "1" else f" * {divisor}")
            shown = [n.lineno for n in inside(source.scope) if isinstance(n, ast.stmt) and _shows(source, n, name)]
            for line in sorted(line for line in shown if line > call.lineno)[:1]:
                yield f"{source.place(line)}: {OWN.format(name=name, given=whole)}"


def _own_loss(source: Source, backward: ast.Call) -> str:
    """Return the name of the loss in `mw.backward(loss)` if it is of this rank's samples alone."""
    loss = backward.args[0] if backward.args else backward
    loss = loss.left if isinstance(loss, ast.BinOp) else loss
    loss = loss.args[0] if isinstance(loss, ast.Call) and name_of(loss) == "scale" and loss.args else loss
    values = source.given_to(loss.id) if isinstance(loss, ast.Name) else []
    own = values and not any(source.verb(each) for value in values for each in ast.walk(value))
    return ast.unparse(loss) if own else ""


def _shows(source: Source, node: ast.stmt, name: str) -> bool:
    """Return whether a statement compares the value of a loss, formats it, or passes it to a call."""
    test = node.test if isinstance(node, ast.If | ast.While) else None
    values = [test.left, *test.comparators] if isinstance(test, ast.Compare) else []
    if isinstance(node, ast.Expr) and not _joins(source, node):
        nodes = list(ast.walk(node))
        values += [each.value for each in nodes if isinstance(each, ast.FormattedValue | ast.keyword)]
        values += [value for each in nodes if isinstance(each, ast.Call) for value in each.args]
    return any(isinstance(each, ast.Name) and each.id == name for each in map(bare, values))


def _joins(source: Source, node: ast.AST) -> bool:
    """Return whether code may run on one rank only, or reduce values over ranks, judging by the names in it."""
    called = {name_of(each) for each in ast.walk(node) if isinstance(each, ast.Call)}
    if any(word in each.lower() for each in called for word in JOINS) or "rank" in ast.unparse(node).lower():
        return True
    return any(isinstance(each, FUNCTIONS) and each.name in called for each in ast.walk(source.tree))


def _divisor(node: ast.AST) -> str:
    return ast.unparse(node.right) if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div) else "1"


def bare(node: ast.expr) -> ast.expr:
    """Return an expression without conversions of its value: `x` for `float(x)`, `x.item()` and `torch.tensor(x)`."""
    while isinstance(node, ast.Call):
        function = node.func
        if isinstance(function, ast.Attribute) and function.attr in PLAIN:
            node = node.args[0] if function.attr in ("tensor", "as_tensor") and node.args else function.value
        elif isinstance(function, ast.Name) and function.id in ("float", "int", "round") and node.args:
            node = node.args[0]
        else:
            break
    return node
