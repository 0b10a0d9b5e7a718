"""The state of a run: one object, and one value that it is saved as.

It does not depend on the plan: a run that was saved under one goes on under another. Random draws and the data order
are keyed by (seed, epoch, step, index), so no generator's state belongs to it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from meshwise.recovery.collect import collected, state_of
from meshwise.spec.errors import CheckpointError
from meshwise.spec.words import some

FORMAT = 1


@dataclass
class RunState:
    """All that a run carries from step to step.

    epoch: counted from 0. index: samples of this epoch's global order that are behind us. step: optimizer steps so far.
    """

    model: nn.Module
    optimizer: Optimizer
    scheduler: LRScheduler | None
    scaler: torch.amp.GradScaler
    seed: int
    epoch: int = 0
    index: int = 0
    step: int = 0


def pack(state: RunState) -> dict[str, Any] | None:
    """The state as plain values and whole tensors on the CPU of rank 0, None on the others. Collective.

    It is the same under every plan and for every number of devices.
    """
    return collected(  # type: ignore[no-any-return]
        {
            "format": FORMAT,
            "model": state_of(state.model),
            "optimizer_kind": type(state.optimizer).__name__,
            "optimizer": state.optimizer.state_dict(),
            "scheduler": state.scheduler.state_dict() if state.scheduler else None,
            "scaler": state.scaler.state_dict(),
            "seed": state.seed,
            "epoch": state.epoch,
            "index": state.index,
            "step": state.step,
        }
    )


def unpack(state: RunState, saved: dict[str, Any]) -> None:
    """Put a saved state into `state`, in place, each tensor laid as its plan says.

    Raises CheckpointError when it is of another model or optimizer.
    """
    if saved.get("format") != FORMAT:
        raise CheckpointError(f"the checkpoint has format {saved.get('format')}; this meshwise reads format {FORMAT}.")
    compare_states(state.model.state_dict(), saved["model"])
    own = type(state.optimizer).__name__
    other = saved.get("optimizer_kind", own)
    if own != other:  # torch would load it and take its settings over the job's
        raise CheckpointError(
            f"the checkpoint is of another optimizer: {other} there and {own} here. Resume with the job that was run."
        )
    state.model.load_state_dict(saved["model"])
    try:
        state.optimizer.load_state_dict(saved["optimizer"])
    except (ValueError, KeyError) as error:
        raise CheckpointError(
            f"the checkpoint is of another optimizer: {error}. Resume with the job that was run."
        ) from None
    if state.scheduler is not None and saved["scheduler"] is not None:
        state.scheduler.load_state_dict(saved["scheduler"])
    if saved["scaler"] and state.scaler.is_enabled():
        state.scaler.load_state_dict(saved["scaler"])
    state.seed, state.epoch, state.index, state.step = (saved[k] for k in ("seed", "epoch", "index", "step"))


def compare_states(own: dict[str, Any], saved: dict[str, Any]) -> None:
    """Raises CheckpointError where a saved model has other tensors than this one."""
    missing, foreign = sorted(own.keys() - saved.keys()), sorted(saved.keys() - own.keys())
    ours, theirs = ({name: getattr(t, "shape", None) for name, t in side.items()} for side in (own, saved))
    other = [name for name in own if name in saved and ours[name] != theirs[name]]
    parts = []
    if missing:
        parts.append(f"it lacks {some(missing)}")
    if foreign:
        parts.append(f"it has {some(foreign)}, which this model does not")
    if other:
        name = other[0]
        parts.append(f"{name} is {tuple(saved[name].shape)} there and {tuple(own[name].shape)} here")
    if parts:
        text = "; ".join(parts)
        raise CheckpointError(f"the checkpoint is of another model: {text}. Resume with the job that was run.")
