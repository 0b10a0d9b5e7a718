"""Find mistakes in the source of programs with the per-rank view.

Such a program sees only its rank's samples, and may mistake a loss of them for one of all samples. Values that are
returned, or passed to other functions of the file, are skipped: they may be summed there.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from typing import TypeGuard

from meshwise.training.slips.user_source import FUNCTIONS, Scope, Source, given, inside, name_of, sources_in

TEXTS = {
    "own": "{name} is the loss of this rank's own samples here. Write {name} = {given}, which gives the loss of the "
    "whole batch, the same on every rank.",
    "running": "{name} adds up losses of this rank's part of each batch, but nothing adds it up over the ranks: it may "
    "differ from the value on one device. Add up what mw.backward returns, times n = mw.sum(len(x)).",
    "divided": "this evaluation divides by {name}, the number of backwards that make a step, so its result is {count} "
    "times too small. Divide only a loss that mw.backward accumulates.",
}
JOINS = ("reduce", "gather", "sync", "sum", "mean", "average", "append", "extend", "update", "add", "push", "put")
"""Parts of the names of functions that reduce a value over the ranks, or keep it for later."""
PLAIN = {"item", "float", "double", "long", "int", "cpu", "clone", "detach", "to", "tolist", "tensor", "as_tensor"}
"""Functions and methods that convert their argument, or the object they are called on, but keep its value."""
COMPREHENSIONS = ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp
Found = Iterator[tuple[int, str]]
"""Source lines and what is wrong there."""


def slips_in(files: Iterable[str]) -> list[str]:
    """Return a sentence for each mistake in the source of these files."""
    found = dict[str, None]()
    for source in (source for file in files for source in sources_in(file)):
        for find in (_own_losses, _running_losses):
            found |= dict.fromkeys(f"{source.place(line)}: {text}" for line, text in sorted(find(source)))
    return list(found)


def _own_losses(source: Source) -> Found:
    """Find losses of this rank that are printed, logged or compared in place of the loss that mw.backward returns."""
    for call in (call for call in source.calls() if source.verb(call) == "backward"):
        if name := _own_loss(source, call):
            divisor = _divisor(call.args[0])
            whole = ast.unparse(call) + ("" if divisor == "1" else f" * {divisor}")
            shown = [n.lineno for n in inside(source.scope) if isinstance(n, ast.stmt) and _shows(source, n, name)]
            for line in sorted(line for line in shown if line > call.lineno)[:1]:
                yield line, TEXTS["own"].format(name=name, given=whole)


def _own_loss(source: Source, backward: ast.Call) -> str:
    """Return the name of the loss in `mw.backward(loss)` or `mw.backward(scaler.scale(loss) / 4)`, if it is computed
    from this rank's samples alone."""
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


def _may_be_joined(source: Source, name: str, behind: tuple[str, ...] = ()) -> bool:
    """Return whether the user's function may reduce the variable `name` over the ranks, or return it."""
    for node in (node for node in inside(source.scope) if not isinstance(node, ast.For) or reads(node.iter, name)):
        if isinstance(node, ast.Global | ast.Nonlocal) and name in node.names:
            return True
        if not reads(node, name):
            continue
        if isinstance(node, ast.Return | ast.Yield | ast.Lambda | ast.ClassDef | FUNCTIONS):
            return True
        if isinstance(node, ast.Call | ast.For | COMPREHENSIONS) and _joins(source, node):
            return True
        for each in {each for each, value in given(node) if reads(value, name)} - {name, *behind}:
            if _may_be_joined(source, each, (*behind, name)):
                return True
    return False


def _running_losses(source: Source) -> Found:
    """Find sums of this rank's losses, or of losses that are weighted by this rank's samples."""
    for loop in (node for node in inside(source.scope) if isinstance(node, ast.For)):
        nodes = list(inside(loop))
        backwards = [node for node in nodes if isinstance(node, ast.Call) and source.verb(node) == "backward"]
        own = {_own_loss(source, call) for call in backwards}
        whole = {name for node in nodes for name, value in given(node) if bare(value) in backwards}
        for node in filter(adds, nodes):
            parts = [each for each in ast.walk(node.value) if isinstance(each, ast.expr)]
            names = {each.id for each in parts if isinstance(each, ast.Name)}
            found = names & own or (names & whole and any(_is_size(source.value(each)) for each in parts))
            if found and not _joins(source, node.value) and not _may_be_joined(source, whole_of(node.target)):
                yield node.lineno, TEXTS["running"].format(name=ast.unparse(node.target))


def _is_size(node: ast.expr) -> bool:
    """Return whether an expression is like `len(x)`, `x.size(0)` or `x.shape[0]`."""
    shape = isinstance(node, ast.Attribute) and node.attr == "shape"
    return shape or (isinstance(node, ast.Call) and name_of(node) in ("len", "size"))


def divided_evaluations(places: Iterable[tuple[str, int]], count: int) -> Iterator[str]:
    """Yield a warning for each evaluation that divides its loss by `count`, the number of backwards in a training step.

    places: the lines of the loops that evaluate.
    """
    for file, line in places if count > 1 else ():
        sources = sources_in(file)
        names = [name for source in sources for name in _divisors(source)]
        divisors = {name for name in names if not name.isdigit() or int(name) == count}
        for loop in loops_at(sources[0].tree, line):
            anew = {name for node in inside(loop) for name, _ in given(node)}
            scopes: list[Scope | ast.For] = [loop, *_called(sources[0], loop)]
            for node in (node for each in scopes for node in inside(each)):
                name = _divisor(node)
                if name in divisors and name not in anew:
                    text = TEXTS["divided"].format(name=name, count=count)
                    yield f"{sources[0].place(node.lineno)}: {text}"  # type: ignore[attr-defined]


def _divisors(source: Source) -> Iterator[str]:
    """Yield the expressions by which a scope divides what it passes to `mw.backward`."""
    for loss in [call.args[0] for call in source.calls() if source.verb(call) == "backward" and call.args]:
        nodes: list[ast.AST] = [loss, *(source.given_to(loss.id) if isinstance(loss, ast.Name) else ())]
        functions = [each for node in nodes for each in _called(source, node)]
        nodes += [n.value for each in functions for n in inside(each) if isinstance(n, ast.Return) and n.value]
        yield from map(_divisor, nodes)


def _divisor(node: ast.AST) -> str:
    return ast.unparse(node.right) if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div) else "1"


def _called(source: Source, node: ast.AST) -> list[ast.FunctionDef]:
    names = {name_of(each) for each in ast.walk(node) if isinstance(each, ast.Call)}
    return [each for each in ast.walk(source.tree) if isinstance(each, ast.FunctionDef) and each.name in names]


def loops_at(tree: ast.Module, line: int) -> list[ast.For]:
    """Return the `for` statements that have this line between the word `for` and the colon."""
    loops = [node for node in ast.walk(tree) if isinstance(node, ast.For)]
    return [node for node in loops if node.lineno <= line <= (node.iter.end_lineno or 0)]


def adds(node: ast.AST) -> TypeGuard[ast.AugAssign]:
    """Return whether a statement is `a += b`."""
    return isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Add)


def reads(node: ast.AST, name: str) -> bool:
    """Return whether a name occurs in the code of a node."""
    return any(isinstance(each, ast.Name) and each.id == name for each in ast.walk(node))


def whole_of(node: ast.expr) -> str:
    """Return the name at the root of an expression: `x` for `x[0]`, `x.shape` and `x[0].shape[1]`."""
    while isinstance(node, ast.Subscript | ast.Attribute):
        node = node.value
    return getattr(node, "id", "")


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
