"""Warn of totals that a loop keeps of this rank's part.

The loop uses them as if they covered all ranks. The warning comes at the end of the loop.

    running += loss * len(x)     that no verb adds up over the ranks; so in stats["loss"] or self.total
    buffer.extend(zip(x, y))     in a buffer that lets old samples go, and is trained on

It warns only if the source leaves no doubt: what is returned, kept elsewhere or passed to other functions of the file
may be summed over ranks there.

Tested in tests/slips/test_slips.py.
"""

from __future__ import annotations

import ast
from collections import Counter, deque
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from torch import nn

from meshwise.compat.tree import tensors_in
from meshwise.slips.user_source import Source, adds, bare, given, inside, loop_at, name_of, reads, source_of, whole_of
from meshwise.spec.user_code import user_frame

RUNNING = (
    "{place}: {name} adds up losses times this rank's part of each batch, but nothing adds it up over the ranks: it "
    "differs from the mean on one device. Count all samples, n = mw.sum(len(x)), and add up what mw.backward returns."
)
BUFFER = (
    "{place}: {name} keeps samples of this rank alone and drops the oldest. It keeps older samples than on one device, "
    "and each rank trains on different ones. Let every rank keep all samples: do not pass the loader to mw.distribute, "
    "and cut the training batches with x, y = mw.split(x, y)."
)
JOINS = ("reduce", "gather", "sync", "sum", "mean", "average")
LETS_GO = ("pop", "popleft", "clear")


def says_counted_parts(ended: Counter[tuple[str, int]], *, uneven: bool) -> Iterator[str]:
    """Yield warnings about the user's loop over a distributed loader that has just ended. A warning says that the loop
    uses a sum or a buffer of this rank's samples as if it covered the samples of all ranks.

    ended: how many loops have ended at each source line. This function counts the loop that has just ended. A line is
        checked after its 1st, 2nd, 4th, 8th ... loop, because several loops may be needed to fill a buffer.
    uneven: whether this rank got different numbers of samples in different batches."""
    frame = user_frame()
    if frame is None:
        return
    ended[frame.f_code.co_filename, frame.f_lineno] += 1
    times = ended[frame.f_code.co_filename, frame.f_lineno]
    if times & (times - 1):
        return
    source = source_of(frame)
    loop = loop_at(source)
    if loop is None or not any(source.verb(node) == "backward" for node in inside(loop)):
        return
    rows = _of_batch(loop)
    for text, found in ((RUNNING, _running(source, loop, rows, uneven)), (BUFFER, _buffers(source, loop, rows))):
        for line, name in found:
            yield text.format(place=source.place(line), name=name)


def _of_batch(loop: ast.For) -> set[str]:
    """Return the names of the variables that hold the batch or a part of it."""
    rows = {node.id for node in ast.walk(loop.target) if isinstance(node, ast.Name)}
    for node in inside(loop):
        for name, value in given(node):
            part = whole_of(bare(value))
            if isinstance(part, ast.Name) and part.id in rows:
                rows.add(name)
    return rows


# A running loss.


def _running(source: Source, loop: ast.For, rows: set[str], uneven: bool) -> Iterator[tuple[int, str]]:
    values = {name: value for node in inside(loop) for name, value in given(node)}
    whole = {name for name, value in values.items() if source.verb(bare(value)) == "backward"}
    backwards = [node for node in inside(loop) if isinstance(node, ast.Call) and source.verb(node) == "backward"]
    own = {node.id for call in backwards for node in call.args[:1] if isinstance(node, ast.Name)} - whole
    for node in inside(loop):
        if not adds(node) or not (isinstance(node.target, ast.Name) or _is_read_behind(source, loop, node.target)):
            continue
        factors = [
            values.get(f.id, f) if isinstance(f, ast.Name) and f.id not in own | whole else f
            for f in _factors(node.value)
        ]
        losses = {f.id for f in map(bare, factors) if isinstance(f, ast.Name)}
        if not any(_counts(f, rows) for f in factors) or not losses & (own | whole):
            continue
        wrong = uneven or bool(losses & own) or _is_divided_by_all(source, node.target)
        if wrong and not may_be_joined(source, node.target):
            yield node.lineno, ast.unparse(node.target)


def _factors(value: ast.expr) -> list[ast.expr]:
    if isinstance(value, ast.BinOp) and isinstance(value.op, ast.Mult):
        return [*_factors(value.left), *_factors(value.right)]
    return [value]


def _counts(node: ast.expr, rows: set[str]) -> bool:
    """Return whether an expression is `len(x)`, `x.size(0)` or `x.shape[0]`, where `x` is a part of the batch."""
    of: ast.expr | None = None
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "len" and node.args:
        of = node.args[0]
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "size" and node.args:
        of = node.func.value
    elif isinstance(node, ast.Subscript) and isinstance(node.value, ast.Attribute) and node.value.attr == "shape":
        of = node.value.value
    whole = None if of is None else whole_of(of)
    return isinstance(whole, ast.Name) and whole.id in rows


def _is_divided_by_all(source: Source, kept: ast.expr) -> bool:
    """Return whether the user's function divides `kept` by a length such as `len(dataset)`, which counts the samples of
    all ranks."""
    for node in inside(source.scope):
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div) and _uses(node.left, kept):
            right = node.right
            if isinstance(right, ast.Call) and isinstance(right.func, ast.Name) and right.func.id == "len":
                return True
    return False


def _is_read_behind(source: Source, loop: ast.For, kept: ast.expr) -> bool:
    """Return whether the function that contains the loop reads `kept` after the loop."""
    below = [n for n in inside(source.scope) if isinstance(n, ast.stmt) and n.lineno > (loop.end_lineno or 0)]
    return any(_uses(node, kept) for node in below)


def _uses(node: ast.AST, kept: ast.expr) -> bool:
    """Return whether code may read `kept`."""
    if isinstance(kept, ast.Name):
        return reads(node, kept.id)
    if not isinstance(kept, ast.Subscript | ast.Attribute):
        return True
    of = ast.unparse(kept.value)
    if isinstance(node, ast.Subscript | ast.Attribute) and ast.unparse(node.value) == of:
        if not isinstance(node.ctx, ast.Load):
            return False
        if isinstance(kept, ast.Attribute):
            return isinstance(node, ast.Attribute) and node.attr == kept.attr
        if isinstance(node, ast.Attribute):
            return True  # what a dict's methods give
        keys = [key.value if isinstance(key, ast.Constant) else None for key in (node.slice, kept.slice)]
        return None in keys or keys[0] == keys[1]
    if isinstance(node, ast.Name | ast.Attribute | ast.Subscript) and ast.unparse(node) == of:
        return True
    return any(_uses(each, kept) for each in ast.iter_child_nodes(node))


def may_be_joined(source: Source, kept: ast.expr, behind: tuple[str, ...] = ()) -> bool:
    """Return whether the user's function may reduce the value `kept` over the ranks."""
    name = kept.id if isinstance(kept, ast.Name) else ""
    functions = {n.name: n for n in ast.walk(source.tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)}
    for node in inside(source.scope):
        if isinstance(node, ast.Return | ast.Yield | ast.Lambda | ast.FunctionDef | ast.ClassDef):
            if _uses(node, kept):
                return True
        elif isinstance(node, ast.Global | ast.Nonlocal) and name in node.names:
            return True
        elif isinstance(node, ast.Assign) and _uses(node.value, kept):
            made = [each for each, of in given(node) if _uses(of, kept)]
            new = [each for each in made if each not in (name, *behind)]
            if not made or any(may_be_joined(source, ast.Name(each), (*behind, name)) for each in new):
                return True
        elif isinstance(node, ast.For | ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp):
            iterated = [node.iter] if isinstance(node, ast.For) else [each.iter for each in node.generators]
            if any(_uses(each, kept) for each in iterated) and _joins(node):
                return True
        elif isinstance(node, ast.Call):
            called = name_of(node)
            if any(_uses(each, kept) for each in ast.iter_child_nodes(node)):
                if called in functions or any(word in called.lower() for word in JOINS):
                    return True
            elif called in functions and _is_method_of(node, kept) and _joins(functions[called]):
                return True
    return False


def _is_method_of(call: ast.Call, kept: ast.expr) -> bool:
    """Return whether the call is a method call on the object that holds `kept`, such as `self` for `self.total`."""
    if not isinstance(kept, ast.Subscript | ast.Attribute) or not isinstance(call.func, ast.Attribute):
        return False
    return ast.unparse(whole_of(kept)) == ast.unparse(whole_of(call.func))


def _joins(part: ast.AST) -> bool:
    """Return whether code calls a function that may reduce values over the ranks, judged by the function's name."""
    calls = [node for node in ast.walk(part) if isinstance(node, ast.Call)]
    return any(word in name_of(call).lower() for call in calls for word in JOINS)


# A buffer of samples.


def _buffers(source: Source, loop: ast.For, rows: set[str]) -> Iterator[tuple[int, str]]:
    for node in inside(loop):
        name = _extended(node, rows)
        if called := _pushed(node, rows):
            kept, batch = source.values.get(called), [source.values.get(row) for row in rows]
            if _is_full_of_samples(kept, batch) and _is_called(loop, called, "sample"):
                yield node.lineno, called  # type: ignore[attr-defined]
        if name and _lets_go(loop, name, source.values.get(name)) and _is_drawn_from(loop, name):
            yield node.lineno, name  # type: ignore[attr-defined]


def _extended(node: ast.AST, rows: set[str]) -> str:
    """Return the name of the list to which a statement appends the samples of a batch."""
    if isinstance(node, ast.For) and any(reads(node.iter, name) for name in rows):
        appends = [n for n in ast.walk(node) if _is_call_of(n, "append")]
        return next((n.func.value.id for n in appends if n.args), "")  # type: ignore[attr-defined]
    if _is_call_of(node, "extend") and any(reads(each, name) for each in node.args for name in rows):  # type: ignore[attr-defined]
        return str(node.func.value.id)  # type: ignore[attr-defined]
    return ""


def _pushed(node: ast.AST, rows: set[str]) -> str:
    """Return the name of an object that a call passes the batch to, as `memory` in `memory.push(x, y)`."""
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
        return ""
    holder, gives = node.func.value, any(reads(each, name) for each in node.args for name in rows)
    return holder.id if gives and isinstance(holder, ast.Name) and holder.id not in rows else ""


def _is_full_of_samples(thing: Any, batch: list[Any]) -> bool:
    """Return whether an object, such as a replay memory, stores single samples in a full deque, which drops its oldest
    sample for each new sample."""
    if isinstance(thing, nn.Module | ModuleType):
        return False
    dims = {tensor.dim() for tensor in tensors_in(batch)}
    for each in list(getattr(thing, "__dict__", {}).values()):
        if isinstance(each, deque) and each and len(each) == each.maxlen:
            sample = [tensor.dim() for tensor in tensors_in(each[-1])]
            return bool(sample and dims) and max(sample) == max(dims) - 1
    return False


def _is_called(loop: ast.For, name: str, word: str) -> bool:
    """Return whether the loop calls a method of the object `name`, and `word` is part of the method's name."""
    calls = [n.func for n in inside(loop) if isinstance(n, ast.Call) and isinstance(n.func, ast.Attribute)]
    return any(word in f.attr and isinstance(f.value, ast.Name) and f.value.id == name for f in calls)


def _is_call_of(node: ast.AST, name: str) -> bool:
    return (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == name
        and isinstance(node.func.value, ast.Name)
    )


def _lets_go(loop: ast.For, name: str, value: Any) -> bool:
    """Return whether the loop removes old entries of a collection, such as by `del buffer[0]` or `buffer.pop(0)`."""
    if isinstance(value, deque) and value.maxlen is not None:
        return len(value) == value.maxlen
    for node in inside(loop):
        if isinstance(node, ast.Delete) and any(reads(target, name) for target in node.targets):
            return True
        if any(each == name and isinstance(of, ast.Subscript) for each, of in given(node)):
            return True
        if any(_is_call_of(node, word) and reads(node.func, name) for word in LETS_GO):  # type: ignore[attr-defined]
            return True
    return False


def _is_drawn_from(loop: ast.For, name: str) -> bool:
    """Return whether the loop draws random entries of the collection in the variable `name`."""
    for node in inside(loop):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            draws = node.func.attr in ("sample", "choice", "choices", "randint", "randperm", "randrange", "permutation")
            if draws and any(reads(each, name) for each in (*node.args, *(k.value for k in node.keywords))):
                return True
    return False
