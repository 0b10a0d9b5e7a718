"""Apply settings that changed before a resume, or refuse them.

A checkpoint holds the settings of the optimizer, the seed of a job, the batch size and the number of samples. Without
this module, torch would silently replace the program's optimizer settings with the saved ones.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch.optim import Optimizer

from meshwise.spec.errors import UsageError

_PLAIN = (bool, int, float, str, type(None), tuple, list)
_OF_TORCH = ("params", "initial_lr", "foreach", "fused", "capturable", "differentiable", "maximize")
"""Settings of parameter groups that a resumed run does not compare with the saved settings."""
CHANGED = "{} is {} from now on. Before, it was {}."


def made_with(
    optimizers: Mapping[str, Optimizer], batch_size: int | None, samples: int | None, seed: int | None = None
) -> dict[str, Any]:
    """Return the program's settings, as plain values to keep in a saved state."""
    groups = {
        name: [
            {key: value for key, value in group.items() if key not in _OF_TORCH and isinstance(value, _PLAIN)}
            for group in each.param_groups
        ]
        for name, each in optimizers.items()
    }
    return {"seed": seed, "batch_size": batch_size, "samples": samples, "optimizers": groups}


def honour(
    optimizers: Mapping[str, Optimizer],
    before: Mapping[str, Any],
    now: Mapping[str, Any],
    say: Callable[[str], object],
    *,
    index: int,
    scheduled: bool,
) -> None:
    """Apply the program's present settings to the restored optimizers, and report each change."""
    if before.get("seed") != now["seed"]:
        raise UsageError(
            f"the seed is {now['seed']}, but the run began with seed {before['seed']}, which determines the order of "
            "its samples. Resume with the job unchanged and without --seed, or begin a new run."
        )
    had, has = before["samples"], now["samples"]
    if index and None not in (had, has) and had != has:
        raise UsageError(
            f"the data set has {has:,} samples, but it had {had:,} when this epoch began. meshwise cannot tell which "
            f"samples are left after the first {index:,}. Resume with the old data set, or from a checkpoint at the "
            "end of an epoch (meshwise checkpoints RUN lists them)."
        )
    for name in ("samples", "batch_size"):
        if None not in (before[name], now[name]) and before[name] != now[name]:
            say(CHANGED.format(name, now[name], before[name]))
    for name, optimizer in optimizers.items():
        _honour_groups(optimizer, before["optimizers"][name], now["optimizers"][name], say, scheduled=scheduled)


def _honour_groups(
    optimizer: Optimizer, before: Any, now: Any, say: Callable[[str], object], *, scheduled: bool
) -> None:
    """Apply the optimizer settings that the program changed after the save, and report each change."""
    if len(before) != len(now) or len(now) != len(optimizer.param_groups):
        return  # different groups are reported when the state is loaded
    for number, (old, new) in enumerate(zip(before, now, strict=True)):
        where = f" of group {number}" if len(now) > 1 else ""
        for name, value in new.items():
            if name not in old or old[name] == value:
                continue
            if scheduled and name in ("lr", "momentum", "betas"):
                raise UsageError(
                    f"{name}{where} is {value} in the program, but the run began with {old[name]}. The scheduler "
                    f"continues from the saved {name}, so the new value has no effect. Resume with {name} {old[name]}, "
                    "or begin a new run from the weights of this run: meshwise weights RUN."
                )
            optimizer.param_groups[number][name] = value
            say(CHANGED.format(name + where, value, old[name]))
