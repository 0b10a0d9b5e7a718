"""Count the steps of a plain script's learning rate scheduler."""

from __future__ import annotations

import ast
import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any

from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from meshwise.checker.plain.record import Record
from meshwise.spec.user_code import frame_in, user_frames, user_place
from meshwise.torch_compat.program_calls import put
from meshwise.training.slips.user_source import given, inside, sources_in

HORIZONS = ("T_max", "total_steps", "total_iters", "step_size", "num_training_steps")
TRAINER = "transformers/trainer.py"
Loop = ast.For | ast.While


def watch_ticks(record: Record) -> list[Callable[[], None]]:
    """Record the steps of learning rate schedulers in `record`, until the returned functions are called."""
    inside, made_at = False, dict[int, tuple[Any, str]]()

    def counting(plain: Any) -> Any:
        @functools.wraps(plain)
        def step(scheduler: Any, *arguments: Any, **named: Any) -> Any:
            nonlocal inside
            inner, inside = inside, True
            if not inner and (plain.__name__ == "__init__" or scheduler.last_epoch < 0):  # scheduler is being created
                made_at[id(scheduler)] = scheduler, user_place()
                record.schedules.append(user_place())
            elif not inner:
                if isinstance(scheduler, ReduceLROnPlateau):
                    record.plateau_metrics.append((user_place(), float((*arguments, named.get("metrics"))[0])))
                record.ticks += 1
                record.horizon = record.horizon or horizon_of(scheduler)
                record.length = record.length or steps_of_trainer() or steps_of_loop()
                record.ticked_at = record.ticked_at or (user_place(), made_at.get(id(scheduler), (None, ""))[1])
            try:
                return plain(scheduler, *arguments, **named)
            finally:
                inside = inner

        return step

    steps = [put([kind], "step", counting) for kind in (LRScheduler, ReduceLROnPlateau)]
    return [*steps, put([ReduceLROnPlateau], "__init__", counting)]


def steps_of_trainer() -> int:
    """Return how many optimizer steps the transformers Trainer makes in all, or 0 if it is not the caller."""
    trainer = getattr(frame_in(TRAINER), "f_locals", {}).get("self")
    return getattr(getattr(trainer, "state", None), "max_steps", 0)


def steps_of_loop() -> int:
    """Return the number of steps at which the program's loop around its present line ends, or 0 if it ends by epochs.

    Such a loop asks for `next` batches in `range(N)`, or compares a counter with N: `if step >= N: break`.
    """
    for frame in user_frames():
        at = frame.f_lineno
        for source in sources_in(frame.f_code.co_filename):
            nodes = list(inside(source.scope))
            loops = [n for n in nodes if isinstance(n, Loop) and n.lineno <= at <= (n.end_lineno or 0)]
            if bound := max(_bounds(nodes, loops, frame), default=0):
                return bound
    return 0


def _bounds(nodes: Sequence[ast.AST], loops: Sequence[Loop], frame: FrameType) -> Iterator[int]:
    """Yield the numbers of steps at which nested loops may end."""
    for loop in loops:
        called = {ast.unparse(node.func) for node in inside(loop) if isinstance(node, ast.Call)}
        if isinstance(loop, ast.For) and isinstance(loop.iter, ast.Call) and ast.unparse(loop.iter.func) == "range":
            yield _number(loop.iter.args[-1], frame) if "next" in called else 0
    ends = [n.test for n in nodes if isinstance(n, ast.If) and isinstance(n.body[-1], ast.Break | ast.Return)]
    ends += [loop.test for loop in loops if isinstance(loop, ast.While)]
    reset = {name for loop in loops for n in inside(loop) if isinstance(n, ast.Assign) for name, _ in given(n)}
    counters = {ast.unparse(n.target) for n in nodes if isinstance(n, ast.AugAssign)} - reset if loops else set()
    for test in (each for end in ends for each in ast.walk(end) if isinstance(each, ast.Compare)):
        sides = {ast.unparse(side): side for side in (test.left, *test.comparators)}
        if sides.keys() & counters:
            yield from (_number(side, frame) for name, side in sides.items() if name not in counters)


def _number(node: ast.expr, frame: FrameType) -> int:
    """Return the integer that a name, an attribute or a constant has in a frame, or 0."""
    if isinstance(node, ast.Constant):
        return node.value if type(node.value) is int else 0
    first, *attributes = ast.unparse(node).split(".")
    value = frame.f_locals.get(first, frame.f_globals.get(first))
    for name in attributes:
        value = getattr(value, name, None)
    return value if type(value) is int else 0


def horizon_of(scheduler: Any) -> int | None:
    """Return the number of scheduler steps after which a schedule ends. Return None if it is unknown."""
    for name in HORIZONS:
        if isinstance(value := getattr(scheduler, name, None), int):
            return value
    for function in getattr(scheduler, "lr_lambdas", ()):
        held = dict(function.keywords) if isinstance(function, functools.partial) else {}
        if inspect.isfunction(function):
            held = dict(inspect.getclosurevars(function).nonlocals)
        numbers = [value for value in held.values() if type(value) is int and value > 1]
        if numbers:
            return max(numbers)  # assumed to be the total number of steps
    return None
