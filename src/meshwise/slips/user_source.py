"""Read the source around the user's line: call, names, loops.

The functions return only what is certain: nothing, if there is no source or a name gets its value elsewhere.

Tested in tests/slips/test_slips.py and tests/slips/test_resumed_loop.py.
"""

from __future__ import annotations

import ast
import functools
import linecache
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import FrameType
from typing import Any, TypeGuard, TypeVar, cast

from meshwise.spec.user_code import place, user_frame

_Answer = TypeVar("_Answer")
_answers: dict[tuple[Any, ...], Any] = {}
Scope = ast.Module | ast.FunctionDef | ast.AsyncFunctionDef
PLAIN = {"item", "float", "double", "long", "int", "cpu", "clone", "detach", "to", "tolist", "tensor", "as_tensor"}
"""Functions and methods that convert their argument, or the object they are called on, but keep its value."""

ROOMS_OF_VERBS = ("meshwise.script.", "meshwise.process.", "meshwise.tracking.", "meshwise.job.")


@dataclass(frozen=True)
class Source:
    """The source code around a user's stack frame.

    tree: the syntax tree of the file.
    scope: the function that is running, or the whole module.
    values: the variables that the frame can see, by name.
    line: the line that is running."""

    file: str
    tree: ast.Module
    scope: Scope
    values: Mapping[str, Any]
    line: int

    def place(self, line: int) -> str:
        """Return the file and the given line as a text, such as `train.py:31`."""
        return place(self.file, line)

    def verb(self, node: ast.AST) -> str:
        """Return the name of the meshwise function that a node calls, such as `sum` for `mw.sum(x)`; empty for any
        other node."""
        if not isinstance(node, ast.Call):
            return ""
        if isinstance(node.func, ast.Attribute) and isinstance(node.func.value, ast.Name):
            module = self.values.get(node.func.value.id)
            return node.func.attr if getattr(module, "__name__", "") == "meshwise" else ""
        function = self.values.get(node.func.id) if isinstance(node.func, ast.Name) else None
        ours = str(getattr(function, "__module__", "")).startswith(ROOMS_OF_VERBS)
        return str(getattr(function, "__name__", "")) if ours else ""

    def given_to(self, name: str) -> list[ast.expr | None]:
        """Return the expressions that the running function assigns to a name."""
        for scope in dict.fromkeys([self.scope, self.tree]):
            found = [value for each, value in values_of(scope) if each == name]
            if found:
                return found
        return []

    def number(self, node: ast.expr) -> int | None:
        """Return the integer value of a constant, a name or an attribute in this frame; None if it is unknown."""
        if isinstance(node, ast.Constant):
            value = node.value
        elif isinstance(node, ast.Name):
            given = self.given_to(node.id)
            alone = given[0] if len(given) == 1 else None
            value = self.values.get(node.id, alone.value if isinstance(alone, ast.Constant) else None)
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            value = getattr(self.values.get(node.value.id), "__dict__", {}).get(node.attr)
        else:
            return None
        return value if isinstance(value, int) and not isinstance(value, bool) else None


def source_of(frame: FrameType) -> Source:
    """Return the source code around the line that a stack frame is running."""
    tree = parsed(frame)
    scope = _scope_of(tree, frame.f_code.co_name, frame.f_lineno)
    return Source(frame.f_code.co_filename, tree, scope, {**frame.f_globals, **frame.f_locals}, frame.f_lineno)


def parsed(frame: FrameType) -> ast.Module:
    """Return the syntax tree of the file of a stack frame. It is empty if there is no source code."""
    return _parsed("".join(linecache.getlines(frame.f_code.co_filename, frame.f_globals)))


@functools.lru_cache(4)
def _parsed(source: str) -> ast.Module:
    try:
        return ast.parse(source)
    except (SyntaxError, ValueError):  # a cell of a notebook with magics
        return ast.Module([], [])


@functools.lru_cache(64)
def _scope_of(tree: ast.Module, name: str, line: int) -> Scope:
    around = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.name == name
        and node.lineno <= line <= (node.end_lineno or 0)
    ]
    return around[-1] if around else tree


def call_in(frame: FrameType, tree: ast.Module) -> ast.Call | None:
    """Return the call that a stack frame is running. Return None if the call is not in `tree`."""
    where = list(frame.f_code.co_positions())[frame.f_lasti // 2]
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    return next((n for n in calls if (n.lineno, n.end_lineno, n.col_offset, n.end_col_offset) == where), None)


def asked(question: Callable[[Source, ast.Call], _Answer], unknown: _Answer) -> _Answer:
    """Return `question(source, call)` for the meshwise call that the user's code is running. The answer is computed
    once for each call in the source, and then remembered. unknown: the answer if there is no source code."""
    frame = user_frame()
    if frame is None:
        return unknown
    key = getattr(question, "__code__", question), frame.f_code.co_filename, frame.f_code.co_firstlineno, frame.f_lasti
    if key not in _answers:
        source = source_of(frame)
        call = call_in(frame, source.tree)
        _answers[key] = unknown if call is None else question(source, call)
    return cast("_Answer", _answers[key])


def loop_at(source: Source) -> ast.For | None:
    """Return the innermost `for` loop whose `for ... in ...` stands on the line `source.line`."""
    loops = [n for n in inside(source.scope) if isinstance(n, ast.For)]
    loops = [n for n in loops if n.lineno <= source.line <= (n.iter.end_lineno or 0)]
    return loops[-1] if loops else None


def inside(scope: Scope | ast.For) -> Iterator[ast.AST]:
    """Yield all nodes in a function or a loop, but not the contents of nested functions and classes."""
    waiting: list[ast.AST] = list(ast.iter_child_nodes(scope))
    while waiting:
        node = waiting.pop()
        yield node
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda):
            waiting += ast.iter_child_nodes(node)


def values_of(scope: Scope) -> Iterator[tuple[str, ast.expr | None]]:
    """Yield (name, value) for each assignment in a function or module. The value is None if it is unknown."""
    if not isinstance(scope, ast.Module):
        every = scope.args
        for argument in (*every.posonlyargs, *every.args, *every.kwonlyargs, every.vararg, every.kwarg):
            if argument is not None:
                yield argument.arg, None
    for node in inside(scope):
        yield from given(node)
        if adds(node) and isinstance(node.target, ast.Name):
            yield node.target.id, node.value
        elif isinstance(node, ast.AugAssign | ast.NamedExpr | ast.For | ast.comprehension | ast.withitem):
            target = node.optional_vars if isinstance(node, ast.withitem) else node.target
            names = () if target is None else ast.walk(target)
            yield from ((each.id, None) for each in names if isinstance(each, ast.Name))


def adds(node: ast.AST) -> TypeGuard[ast.AugAssign]:
    """Return whether a statement is `a += b`."""
    return isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Add)


def given(node: ast.AST) -> Iterator[tuple[str, ast.expr]]:
    """Yield (name, value) for each name that an assignment sets, as in `a = b = 0` or `a, b = 0, 0.0`."""
    if not isinstance(node, ast.Assign | ast.AnnAssign) or node.value is None:
        return
    value = node.value
    for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
        if isinstance(target, ast.Name):
            yield target.id, value
        elif isinstance(target, ast.Tuple):
            several = value.elts if isinstance(value, ast.Tuple) else [value] * len(target.elts)
            yield from (
                (each.id, of) for each, of in zip(target.elts, several, strict=False) if isinstance(each, ast.Name)
            )


def reads(node: ast.AST, name: str) -> bool:
    """Return whether a name occurs in the code of a node."""
    return any(isinstance(each, ast.Name) and each.id == name for each in ast.walk(node))


def name_of(call: ast.Call) -> str:
    """Return the name of the called function or method: `f` for `f(x)` and `a.f(x)`. Return an empty string if it has
    no name."""
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")


def whole_of(node: ast.expr) -> ast.expr:
    """Return the object of which an expression is a part: `x` for `x[0]`, `x.shape` and `x[0].shape[1]`."""
    while isinstance(node, ast.Subscript | ast.Attribute):
        node = node.value
    return node


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
