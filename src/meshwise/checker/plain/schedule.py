"""Count the steps of a plain script's learning rate scheduler."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from meshwise.checker.plain.record import Record
from meshwise.spec.user_code import frame_in, user_place
from meshwise.torch_compat.program_calls import put

HORIZONS = ("T_max", "total_steps", "total_iters", "step_size", "num_training_steps")
TRAINER = "transformers/trainer.py"


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
                record.length = record.length or steps_of_trainer()
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
