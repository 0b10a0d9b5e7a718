"""Warn of a validation loss divided by the accumulation steps.

Only the training loss should be divided, as it is summed over accumulated backwards.

    loss = criterion(model(x), y) / ACCUMULATE      where mw.backward(loss) follows, and in the evaluation too

It warns if the source divides both losses by the same name or number, and a step has that many backwards.

Tested in tests/equivalence/test_hints.py.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass

from meshwise.slips.user_source import Scope, Source, given, inside, loop_at, name_of, reads, source_of
from meshwise.spec.user_code import user_frame

DIVIDED = (
    "{place}: this evaluation divides by {divisor}, the number of backwards that make a step, so its result is {count} "
    "times too small. Divide only a loss that mw.backward accumulates."
)


@dataclass(frozen=True)
class Evaluated:
    """A loop of the user that may be an evaluation, with the source code that contains the loop."""

    source: Source
    loop: ast.For


def evaluated_here() -> Evaluated | None:
    """Return the `for` loop at the line that the user's code is running, with the source code around it. Return None if
    there is no source code, or no `for` loop at that line."""
    frame = user_frame()
    if frame is None:
        return None
    source = source_of(frame)
    loop = loop_at(source)
    return None if loop is None else Evaluated(source, loop)


def divided_evaluation(evaluated: Evaluated, count: int) -> Iterator[str]:
    """Yield a warning if an evaluation loop divides its loss as the training does. The training divides its loss by
    `count` because it adds up the gradients of `count` backwards. The result of the evaluation is then `count` times
    too small."""
    source = evaluated.source
    if count < 2:
        return
    divisors = {ast.dump(node): node for node in _of_training(source) if source.number(node) == count}
    for node, divisor in _divisions(evaluated.loop, source):
        if ast.dump(divisor) in divisors and not _is_given_in(evaluated.loop, divisor):
            yield DIVIDED.format(place=source.place(node.lineno), divisor=ast.unparse(divisor), count=count)
            return


def _of_training(source: Source) -> Iterator[ast.expr]:
    """Yield the expressions by which the program divides the losses that it passes to `mw.backward`."""
    scopes: list[Scope] = [source.tree, *(n for n in ast.walk(source.tree) if isinstance(n, ast.FunctionDef))]
    for scope in scopes:
        nodes = list(inside(scope))
        for call in nodes:
            if source.verb(call) != "backward" or not isinstance(call, ast.Call) or not call.args:
                continue
            loss = call.args[0]
            values = [loss]
            if isinstance(loss, ast.Name):
                values += [value for node in nodes for name, value in given(node) if name == loss.id]
                values += [n for n in nodes if isinstance(n, ast.AugAssign) and reads(n.target, loss.id)]  # type: ignore[misc]
            for value in values:
                yield from (divisor for _, divisor in _divided(value))
                for function in _called(value, source):
                    yield from (divisor for _, divisor in _divided_in(function))


def _divisions(loop: ast.For, source: Source) -> Iterator[tuple[ast.expr | ast.stmt, ast.expr]]:
    """Yield (node, divisor) for each division in the loop, and in functions of the same file that the loop calls."""
    for node in inside(loop):
        yield from _divided(node, deep=False)
        if isinstance(node, ast.Call):
            for function in _called(node, source):
                yield from _divided_in(function)


def _divided(node: ast.AST, deep: bool = True) -> Iterator[tuple[ast.expr | ast.stmt, ast.expr]]:
    for each in ast.walk(node) if deep else [node]:
        if isinstance(each, ast.BinOp) and isinstance(each.op, ast.Div):
            yield each, each.right
        elif isinstance(each, ast.AugAssign) and isinstance(each.op, ast.Div):
            yield each, each.value


def _divided_in(function: ast.FunctionDef) -> Iterator[tuple[ast.expr | ast.stmt, ast.expr]]:
    for node in inside(function):
        yield from _divided(node, deep=False)


def _called(value: ast.AST, source: Source) -> Iterator[ast.FunctionDef]:
    names = {name_of(each) for each in ast.walk(value) if isinstance(each, ast.Call)}
    yield from (n for n in ast.walk(source.tree) if isinstance(n, ast.FunctionDef) and n.name in names)


def _is_given_in(loop: ast.For, divisor: ast.expr) -> bool:
    return any(reads(divisor, name) for node in inside(loop) for name, _ in given(node))
