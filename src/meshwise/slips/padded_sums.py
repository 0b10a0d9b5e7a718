"""Refuse sums over ranks of values that count padding samples.

Such a value is summed in a loop over batches that are too small for all ranks, and reduced over ranks after the loop;
`over_ranks` would refuse that there. If the source shows it, it is refused at the start.

Tested in tests/slips/test_padded_sums.py.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset, RandomSampler
from torch.utils.data import SequentialSampler as Sequential

from meshwise.slips.user_source import Source, adds, bare, call_in, given, inside, name_of, reads, source_of
from meshwise.spec.errors import UsageError
from meshwise.spec.units import plural
from meshwise.spec.user_code import user_frame

PADDED = (
    "{place}: {verb} of {name}, which the loop at line {loop} adds up: {batch} of its loader has {samples}, fewer "
    "than the {ranks} ranks, so {name} would include a padding sample. Call {verb} inside the loop, on each batch's "
    "value, or use at most {fewer}."
)
DEEP = 3  # functions within functions
EACH = "each batch"
WHOLE = ("enumerate", "tqdm", "track")
"""Functions that wrap a loader in a `for` statement, and yield all of its batches."""


def refuse_padded_sums(objects: Sequence[Any], ranks: int) -> None:
    """Raise UsageError if the source code of the program would include a padding sample in a sum.

    A batch with fewer samples than ranks gives a padding sample to each rank without samples. If a loop adds up values
    of its batches, and the sum is reduced over the ranks only after the loop, it includes the padding sample.

    objects: the objects given to `mw.distribute`, among them the loaders."""
    fewest = {number: _fewest(each, ranks) for number, each in enumerate(objects)}
    short = {number: each for number, each in fewest.items() if each is not None}
    frame = user_frame() if short else None
    if frame is None:
        return
    source = source_of(frame)
    names = _names_of_result(source, call_in(frame, source.tree), len(objects))
    for number, (batch, samples) in short.items():
        found = _sums(source, names.get(number, ""), DEEP, every=batch == EACH)
        for loop, call, name in sorted(found, key=lambda each: each[1].lineno):
            where, verb = source.place(call.lineno), source.verb(call)
            facts = {"loop": loop.lineno, "batch": batch, "samples": plural(samples, "sample"), "ranks": ranks}
            fewer = plural(samples, "device")
            raise UsageError(PADDED.format(place=where, verb=f"mw.{verb}", name=name, fewer=fewer, **facts))


def _fewest(loader: Any, ranks: int) -> tuple[str, int] | None:
    """Return which batches of a loader have fewer samples than there are ranks, and how many samples: for example,
    `("the last batch", 2)`. Return None if all batches have enough samples, or if this is unknown."""
    if not isinstance(loader, DataLoader) or type(loader.batch_sampler) is not BatchSampler or not loader.batch_size:
        return None
    if loader.batch_size < ranks:
        return EACH, loader.batch_size
    if isinstance(loader.dataset, IterableDataset) or loader.drop_last:
        return None
    sampler = loader.sampler
    whole = isinstance(sampler, Sequential | DistributedSampler) or (
        isinstance(sampler, RandomSampler) and not sampler.replacement and sampler.num_samples == len(loader.dataset)  # type: ignore[arg-type]
    )
    left = len(loader.dataset) % loader.batch_size if whole else 0  # type: ignore[arg-type]
    return ("the last batch", left) if 0 < left < ranks else None


def loops_of_value(source: Source, call: ast.Call) -> tuple[str, ...]:
    """Find the `for` loops that have computed the argument of a call of `mw.sum` or `mw.mean` by adding up values.
    Return the source lines of the loops, such as `("train.py:31",)`. A loop may be in the function that contains the
    call, or in a function of the same file that has returned the argument."""
    return _loops_of(source, call, _added)


def loops_of_loss(source: Source, call: ast.Call) -> tuple[str, ...]:
    """Find the `for` loops whose last loss is the argument of a call of `mw.sum` or `mw.mean` after the loop. Such a
    loop sets the variable for each batch, and passes it to `mw.backward`. Return the lines as `loops_of_value` does."""
    return _loops_of(source, call, partial(_losses, source))


def _loops_of(source: Source, call: ast.Call, names_of: Callable[[ast.For], set[str]]) -> tuple[str, ...]:
    nodes = list(inside(source.scope))
    loops = [n for n in nodes if isinstance(n, ast.For) and _joined(source, call, n, names_of(n))]
    given_by = [value for node in nodes for name, value in given(node) if call.args and reads(call.args[0], name)]
    called = {name_of(value) for value in given_by if isinstance(value, ast.Call) and value.lineno < call.lineno}
    for function in ast.walk(source.tree):
        if isinstance(function, ast.FunctionDef) and function.name in called and source.verb(call) in ("sum", "mean"):
            loops += [n for n in inside(function) if isinstance(n, ast.For) and _is_given_back(function, n, names_of)]
    return tuple(source.place(line) for n in loops for line in range(n.lineno, (n.iter.end_lineno or n.lineno) + 1))


def _is_given_back(function: ast.FunctionDef, loop: ast.For, names_of: Callable[[ast.For], set[str]]) -> bool:
    """Return whether a function returns a value that its loop has computed, without changing it after the loop."""
    behind = [node for node in inside(function) if getattr(node, "lineno", 0) > (loop.end_lineno or 0)]
    anew = {name for node in behind for name, _ in given(node)}
    returned = [node.value for node in behind if isinstance(node, ast.Return) and node.value is not None]
    plain = [value for value in returned if not any(isinstance(each, ast.Call) for each in ast.walk(bare(value)))]
    return any(reads(value, name) for value in plain for name in names_of(loop) - anew)


def _losses(source: Source, loop: ast.For) -> set[str]:
    calls = [node for node in inside(loop) if isinstance(node, ast.Call) and source.verb(node) == "backward"]
    anew = (pair for node in inside(loop) for pair in given(node))
    return {name for name, value in anew if not reads(value, name) and any(reads(call, name) for call in calls)}


def _names_of_result(source: Source, call: ast.Call | None, count: int) -> dict[int, str]:
    """For a function that returns one result for each argument, return the variables to which the results are assigned:
    the call `a, b = f(x, y)` gives `{0: "a", 1: "b"}`. Return an empty dict if the results are not assigned to
    variables, or if the source does not show `count` arguments."""
    if call is None or len(call.args) != count or any(isinstance(each, ast.Starred) for each in call.args):
        return {}
    for node in inside(source.scope):
        if isinstance(node, ast.Assign) and node.value is call and len(node.targets) == 1:
            target = node.targets[0]
            parts = target.elts if isinstance(target, ast.Tuple | ast.List) and count > 1 else [target]
            return {number: each.id for number, each in enumerate(parts) if isinstance(each, ast.Name)}
    return {}


def _sums(source: Source, loader: str, deep: int, *, every: bool) -> Iterator[tuple[ast.For, ast.Call, str]]:
    """Find loops over a loader that add up values, if the sum is reduced over the ranks after the loop."""
    nodes = list(inside(source.scope))
    for loop in nodes:
        if isinstance(loop, ast.For) and _reads_all(loop.iter, loader) and (every or not _is_left(loop)):
            added = _added(loop)
            for call in nodes:
                if isinstance(call, ast.Call) and (name := _joined(source, call, loop, added)):
                    yield loop, call, name
        elif isinstance(loop, ast.Call) and deep:
            for function, name in _parameters(source.tree, loop, loader):
                yield from _sums(replace(source, scope=function), name, deep - 1, every=every)


def _reads_all(node: ast.expr, loader: str) -> bool:
    if isinstance(node, ast.Call) and name_of(node) in WHOLE and node.args:
        node = node.args[0]
    return isinstance(node, ast.Name) and node.id == loader


def _is_left(loop: ast.For) -> bool:
    return any(isinstance(node, ast.Break | ast.Return) for node in inside(loop))


def _added(loop: ast.For) -> set[str]:
    """Return the names to which a loop adds values, by `a += b` or `a = a + b`."""
    names = {n.target.id for n in inside(loop) if adds(n) and isinstance(n.target, ast.Name)}
    every = (pair for node in inside(loop) for pair in given(node))
    return names | {name for name, value in every if isinstance(value, ast.BinOp) and reads(value, name)}


def _joined(source: Source, call: ast.Call, loop: ast.For, added: set[str]) -> str:
    """Return which variable a call of `mw.sum` or `mw.mean` reduces over the ranks, if the loop before the call has
    added up values in it: `total` for `mw.sum(total)`. Return an empty string for any other call, and if the variable
    gets a new value between the loop and the call.

    added: the variables in which the loop adds up values."""
    if call.lineno <= (loop.end_lineno or 0):
        return ""
    if source.verb(call) not in ("sum", "mean") or not call.args or any(each.arg == "grad" for each in call.keywords):
        return ""
    value = bare(call.args[0])
    found = next((name for name in sorted(added) if reads(value, name)), "")
    between = (n for n in inside(source.scope) if (loop.end_lineno or 0) < getattr(n, "lineno", 0) < call.lineno)
    anew = any(name == found and not reads(of, name) for node in between for name, of in given(node))
    return "" if anew else found


def _parameters(tree: ast.Module, call: ast.Call, name: str) -> Iterator[tuple[ast.FunctionDef, str]]:
    """Find the parameter of a function that receives the variable `name` in a call."""
    given_at = {at for at, each in enumerate(call.args) if isinstance(each, ast.Name) and each.id == name}
    by_name = {k.arg for k in call.keywords if isinstance(k.value, ast.Name) and k.value.id == name}
    if not name or not isinstance(call.func, ast.Name) or not (given_at or by_name):
        return
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef) and function.name == call.func.id:
            parameters = [each.arg for each in (*function.args.posonlyargs, *function.args.args)]
            for at, parameter in enumerate(parameters):
                if at in given_at or parameter in by_name:
                    yield function, parameter
