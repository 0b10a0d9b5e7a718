"""What a resumed job has otherwise than the run that it goes on with: honoured and said, or refused.

A checkpoint holds what the optimizer was made with, the seed, the batch and how many samples there are. torch takes the
optimizer's saved settings over those of the program without a word. Tested in tests/training/test_resume_changes.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch.optim import Optimizer

from meshwise.recovery.state import RunState
from meshwise.spec.errors import UsageError
from meshwise.training.job import Job

_PLAIN = (bool, int, float, str, type(None), tuple, list)
_OF_TORCH = ("params", "initial_lr", "foreach", "fused", "capturable", "differentiable", "maximize")
"""What of a group is no setting of the program's, or changes nothing of the numbers."""


def made_with(job: Job, optimizer: Optimizer, samples: int) -> dict[str, Any]:
    """What a run is made with, as its checkpoints keep it: plain values."""
    groups = [
        {name: value for name, value in group.items() if name not in _OF_TORCH and isinstance(value, _PLAIN)}
        for group in optimizer.param_groups
    ]
    return {"seed": job.seed, "batch_size": job.batch_size, "samples": samples, "groups": groups}


def honour(state: RunState, before: Any, now: Mapping[str, Any], say: Callable[[str], object]) -> None:
    """Let `state`, which was just restored, have what the program says now, where that is possible, and say so. before:
    what the run was made with; None of an older checkpoint. Raises UsageError for what cannot be honoured."""
    if not isinstance(before, Mapping):
        return
    if before["seed"] != now["seed"]:
        raise UsageError(
            f"the seed is {now['seed']}, and the run was begun with {before['seed']}: the order of its samples follows "
            "from it. Resume without --seed and with the job as it was, or begin a new run."
        )
    if before["samples"] != now["samples"]:
        if state.index:
            raise UsageError(
                f"the data set has {now['samples']:,} samples, and had {before['samples']:,} as this epoch began, "
                f"{state.index:,} of which are done: which are left cannot be told. Resume with that data set, or from "
                "a state of an epoch's end: meshwise checkpoints RUN."
            )
        say(f"The data set has {now['samples']:,} samples from here on, and had {before['samples']:,}.")
    if before["batch_size"] != now["batch_size"]:
        say(f"The global batch is {now['batch_size']} samples from here on, and was {before['batch_size']}.")
    _honour_groups(state, before["groups"], now["groups"], say)


def _honour_groups(state: RunState, before: Any, now: Any, say: Callable[[str], object]) -> None:
    """The settings of the optimizer: those that the program has changed since."""
    if len(before) != len(now) or len(now) != len(state.optimizer.param_groups):
        return  # other groups are told where the state is loaded
    for number, (old, new) in enumerate(zip(before, now, strict=True)):
        where = f" of group {number}" if len(now) > 1 else ""
        for name, value in new.items():
            if name not in old or _same(old[name], value):
                continue
            if state.scheduler is not None and name in ("lr", "momentum", "betas"):
                raise UsageError(
                    f"{name}{where} is {value} in the program, and the run was begun with {old[name]}: its schedule "
                    f"goes on from the saved state, and would not follow. Resume with {name} {old[name]}, or begin a "
                    "new run from its weights: meshwise weights RUN."
                )
            state.optimizer.param_groups[number][name] = value
            say(f"{name}{where} is {value} from here on, and was {old[name]}.")


def _same(old: Any, new: Any) -> bool:
    return list(old) == list(new) if isinstance(old, tuple | list) and isinstance(new, tuple | list) else old == new
