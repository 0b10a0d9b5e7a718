"""Read the user's source: scopes, names, calls and loops."""

from __future__ import annotations

import ast
import linecache
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from meshwise.spec.user_code import place

FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef
Scope = ast.Module | ast.FunctionDef | ast.AsyncFunctionDef
DEEP = 3  # how many assignments to follow from one name to the next


@dataclass(frozen=True)
class Source:
    """The source of a function, or of a module without its functions.

    tree: the syntax tree of the file."""

    file: str
    tree: ast.Module
    scope: Scope

    def place(self, line: int) -> str:
        """Return the file and the given line as a text, such as `train.py:31`."""
        return place(self.file, line)

    def calls(self) -> Iterator[ast.Call]:
        """Yield the calls in the scope."""
        yield from (node for node in inside(self.scope) if isinstance(node, ast.Call))

    def verb(self, node: ast.AST) -> str:
        """Return the name of the meshwise function that a node calls, such as `sum` for `mw.sum(x)`; empty for any
        other node."""
        function = node.func if isinstance(node, ast.Call) else None
        of_meshwise = isinstance(function, ast.Attribute) and ast.unparse(function.value) in ("mw", "meshwise")
        return function.attr if of_meshwise else ""  # type: ignore[union-attr]

    def given_to(self, name: str) -> list[ast.expr]:
        """Return the expressions that the scope assigns to a name, such as `a + b` for `a += b`, or else what the
        module assigns to it."""
        for scope in (self.scope, self.tree):
            nodes = list(inside(scope))
            if any(isinstance(node, ast.arg) and node.arg == name for node in nodes):
                break
            if found := [value for node in nodes for each, value in given(node) if each == name]:
                return found
        return []

    def value(self, node: ast.expr) -> ast.expr:
        """Return the value of a name that is assigned once, or else `node` itself."""
        for _ in range(DEEP):
            values = self.given_to(node.id) if isinstance(node, ast.Name) else []
            node = values[0] if len(values) == 1 else node
        return node


def sources_in(file: str, names: dict[str, Any] | None = None) -> list[Source]:
    """Return the scopes of a file: the module first, then its functions.

    names: the globals of a module that has no file."""
    try:
        tree = ast.parse("".join(linecache.getlines(file, names)))
    except (SyntaxError, ValueError):  # for example a cell of a notebook with magics
        tree = ast.Module([], [])
    return [Source(file, tree, scope) for scope in ast.walk(tree) if isinstance(scope, Scope)]


def inside(scope: Scope | ast.For | ast.While) -> Iterator[ast.AST]:
    """Yield all nodes in a function or a loop, but not the contents of nested functions and classes."""
    waiting: list[ast.AST] = list(ast.iter_child_nodes(scope))
    while waiting:
        node = waiting.pop()
        yield node
        if not isinstance(node, FUNCTIONS | ast.ClassDef | ast.Lambda):
            waiting += ast.iter_child_nodes(node)


def given(node: ast.AST) -> Iterator[tuple[str, ast.expr]]:
    """Yield (name, value) for each name that an assignment sets, as in `a = b = 0`, `a, b = 0, 0.0` or `a += b`."""
    if isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name):
        yield node.target.id, ast.BinOp(node.target, node.op, node.value)
    if not isinstance(node, ast.Assign | ast.AnnAssign) or node.value is None:
        return
    value = node.value
    for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
        targets = target.elts if isinstance(target, ast.Tuple) else [target]
        pairs = isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple)
        values = value.elts if pairs else [value] * len(targets)  # type: ignore[attr-defined]
        yield from ((each.id, of) for each, of in zip(targets, values, strict=False) if isinstance(each, ast.Name))


def name_of(call: ast.Call) -> str:
    """Return the name of the called function or method: `f` for `f(x)` and `a.f(x)`. Return an empty string if it has
    no name."""
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
