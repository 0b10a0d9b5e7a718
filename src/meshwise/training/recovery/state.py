"""Define a run's state, and the value it is saved as.

The state does not depend on the plan: a run that was saved under one plan can resume under another. Random draws and
the data order are derived from (seed, epoch, step, index), so that no generator's state is part of the state.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from meshwise.spec.errors import CheckpointError
from meshwise.spec.words import some
from meshwise.torch_compat.modules import takes_hooks
from meshwise.torch_compat.tree import map_kind
from meshwise.training.recovery.collect import collected, held_of, state_of
from meshwise.training.recovery.loading import Stored
from meshwise.training.recovery.loading import whole as stored_whole
from meshwise.transfer import stages


@dataclass
class RunState:
    """Everything that a run carries from step to step.

    epoch: counted from 0.
    index: how many samples of this epoch, in the global order, are done.
    step: how many optimizer steps are done.
    """

    model: nn.Module
    optimizer: Optimizer
    scheduler: LRScheduler | None
    scaler: torch.amp.GradScaler
    seed: int
    epoch: int = 0
    index: int = 0
    step: int = 0
    made_with: Any = None
    """The program's settings, such as the optimizer's, and the number of samples, as plain values."""
    holds_all: bool = False
    """Whether the optimizer is known to hold all parameters of the model."""


def tree_of(state: RunState, whole: bool = False) -> dict[str, Any]:
    """Return the part of the state that this rank holds, as a tree of plain values and tensors."""
    own = state_of(state.model) if whole else held_of(state.model)
    return {
        "model": own,
        "optimizer_kind": type(state.optimizer).__name__,
        "optimizer": state.optimizer.state_dict(),
        "scheduler": state.scheduler.state_dict() if state.scheduler else None,
        "scaler": state.scaler.state_dict(),
        "seed": state.seed,
        "epoch": state.epoch,
        "index": state.index,
        "step": state.step,
        "made_with": state.made_with,
    }


def pack(state: RunState) -> dict[str, Any] | None:
    """Return the state with whole CPU tensors on rank 0, and None on other ranks. Collective."""
    return collected(tree_of(state, whole=True))  # type: ignore[no-any-return]


def unpack(state: RunState, saved: dict[str, Any]) -> None:
    """Load a saved state into `state`, in place. The tensors in `state` keep their sharding.

    A `Stored` tensor is still in a file, from which each rank reads only the part that it needs. Raises CheckpointError
    if the saved state belongs to another model or optimizer.
    """
    own_kind, other = type(state.optimizer).__name__, saved.get("optimizer_kind")
    compare_states(state.model.state_dict(), saved["model"])
    if other is not None and own_kind != other:  # torch would load it and take its settings over the job's
        raise CheckpointError(
            f"the checkpoint belongs to another optimizer: it was saved with {other}, but this job uses {own_kind}. "
            "Resume with the job that saved it."
        )
    load_model(state.model, saved["model"])
    try:
        load_optimizer(state.optimizer, saved["optimizer"])
    except (ValueError, KeyError) as error:
        raise CheckpointError(
            f"the checkpoint belongs to another optimizer: {error}. Resume with the job that saved it."
        ) from None
    rest = stored_whole({name: value for name, value in saved.items() if name not in ("model", "optimizer")})
    if state.scheduler is not None and rest["scheduler"] is not None:
        state.scheduler.load_state_dict(rest["scheduler"])
    if rest["scaler"] and state.scaler.is_enabled():
        state.scaler.load_state_dict(rest["scaler"])
    state.seed, state.epoch, state.index, state.step = (rest[k] for k in ("seed", "epoch", "index", "step"))
    state.made_with = rest.get("made_with")


def load_model(model: nn.Module, saved: dict[str, Any]) -> None:
    """Call `model.load_state_dict` with values that may be `Stored` tensors. Each rank reads only its part of them."""
    own, lacking = model.state_dict(keep_vars=True), stages.lacks(model)

    def given(name: str, value: Any) -> Any:
        if not isinstance(value, Stored):
            return stored_whole(value)  # a tensor, or the extra state of a module
        if name in lacking and isinstance(own[name], Tensor):  # torch compares shapes; the values are another rank's
            return torch.full((), torch.nan).to(own[name].dtype).expand(value.shape)
        return value.like(own[name]) if isinstance(own.get(name), Tensor) else value.whole()

    model.load_state_dict({name: given(name, value) for name, value in saved.items()})


def load_optimizer(optimizer: Optimizer, saved: dict[str, Any]) -> None:
    """Call `optimizer.load_state_dict(saved)`, where `saved` may contain `Stored` tensors that are still in the
    checkpoint."""
    if not takes_hooks(optimizer):
        optimizer.load_state_dict(stored_whole(saved))
        return
    hook = optimizer.register_load_state_dict_pre_hook(_read_state)
    try:
        optimizer.load_state_dict(saved)
    finally:
        hook.remove()


def _read_state(optimizer: Optimizer, saved: dict[str, Any]) -> dict[str, Any]:
    numbers = [number for group in saved["param_groups"] for number in group["params"]]
    held = [p for group in optimizer.param_groups for p in group["params"]]
    places = dict(zip(numbers, held, strict=False)) if len(numbers) == len(held) else {}  # torch reports other numbers

    def read(number: Any, entry: Any) -> Any:
        p = places.get(number)
        return stored_whole(entry) if p is None else map_kind(Stored, lambda each: each.like(p), entry)

    state = {number: read(number, entry) for number, entry in saved["state"].items()}
    return {**{name: stored_whole(value) for name, value in saved.items() if name != "state"}, "state": state}


def compare_states(own: dict[str, Any], saved: dict[str, Any]) -> None:
    """Raise CheckpointError unless the saved state_dict of a model has the same names and shapes as this model's."""
    missing, foreign = sorted(own.keys() - saved.keys()), sorted(saved.keys() - own.keys())
    ours, theirs = ({name: getattr(t, "shape", None) for name, t in side.items()} for side in (own, saved))
    other = [name for name in own if name in saved and ours[name] != theirs[name]]
    parts = []
    if missing:
        parts.append(f"it lacks {some(missing)}")
    if foreign:
        parts.append(f"it has {some(foreign)}, which this model does not have")
    if other:
        name = other[0]
        parts.append(f"{name} has shape {tuple(saved[name].shape)} in it and {tuple(own[name].shape)} in this model")
    if parts:
        text = "; ".join(parts)
        raise CheckpointError(f"the checkpoint belongs to another model: {text}. Resume with the job that saved it.")
