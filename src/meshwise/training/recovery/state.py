"""Define a run's state, and the form in which it is saved.

The state does not depend on the plan: a run that was saved under one plan can resume under another. Random draws and
the data order are derived from (seed, epoch, step, index), so that no generator's state is part of the state.
"""

from __future__ import annotations

from collections.abc import Mapping
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

Objects = Mapping[str, Mapping[str, Any]]
"""For each kind, such as `model`, a program's objects by name. A single object has the name ""."""
PLAIN = ("seed", "epoch", "index", "step", "made_with")
OTHER = "the checkpoint belongs to another optimizer: {}. Resume with the program that saved it."


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


def tree_of(state: RunState) -> dict[str, Any]:
    """Return the part of the state that this rank holds, as a tree of plain values and tensors."""
    return {
        **tree_of_objects(_objects(state)),
        "scaler": state.scaler.state_dict(),
        **{name: getattr(state, name) for name in PLAIN},
    }


def pack(state: RunState) -> dict[str, Any] | None:
    """Return the state with whole CPU tensors on rank 0, and None on other ranks. Collective."""
    return collected({**tree_of(state), "model": state_of(state.model)})  # type: ignore[no-any-return]


def unpack(state: RunState, saved: dict[str, Any]) -> None:
    """Load a saved state into `state`, in place, as `restore_objects` does."""
    restore_objects(_objects(state), saved)
    rest = stored_whole({name: saved[name] for name in ("scaler", *PLAIN)})
    if rest["scaler"] and state.scaler.is_enabled():
        state.scaler.load_state_dict(rest["scaler"])
    for name in PLAIN:
        setattr(state, name, rest[name])


def _objects(state: RunState) -> Objects:
    scheduler = {"": state.scheduler} if state.scheduler else {}
    return {"model": {"": state.model}, "optimizer": {"": state.optimizer}, "scheduler": scheduler}


def tree_of_objects(objects: Objects) -> dict[str, Any]:
    """Return what this rank holds of the states of a program's objects."""
    held = {name: held_of(model) for name, model in objects["model"].items()}
    optimizers = objects["optimizer"].items()
    return {
        "models": list(held),
        "model": held.get("", held),
        "optimizer": {name: {"kind": type(each).__name__, "state": each.state_dict()} for name, each in optimizers},
        "scheduler": {name: each.state_dict() for name, each in objects["scheduler"].items()},
    }


def restore_objects(objects: Objects, tree: Mapping[str, Any]) -> None:
    """Load what `tree_of_objects` returned into the objects, in place. Tensors keep their sharding.

    A `Stored` tensor is still in a file, from which each rank reads only the part that it needs. A scheduler that was
    not saved starts anew. Raises CheckpointError if the state belongs to another model or optimizer.
    """
    saved = {"": tree["model"]} if tree["models"] == [""] else tree["model"]
    for name, model in objects["model"].items():
        compare_states(model.state_dict(), saved[name])
        load_model(model, saved[name])
    for name, optimizer in objects["optimizer"].items():
        kind, own = tree["optimizer"][name]["kind"], type(optimizer).__name__
        if kind != own:  # torch would load such a state, and replace the program's settings
            raise CheckpointError(OTHER.format(f"it was saved with {kind}, but this program uses {own}"))
        try:
            load_optimizer(optimizer, tree["optimizer"][name]["state"])
        except (ValueError, KeyError) as error:
            raise CheckpointError(OTHER.format(error)) from None
    for name in objects["scheduler"].keys() & tree["scheduler"].keys():
        objects["scheduler"][name].load_state_dict(stored_whole(tree["scheduler"][name]))


def load_model(model: nn.Module, saved: dict[str, Any]) -> None:
    """Call `model.load_state_dict` with values that may be `Stored`. Each rank reads only its part."""
    own, lacking = model.state_dict(keep_vars=True), stages.lacks(model)

    def given(name: str, value: Any) -> Any:
        if not isinstance(value, Stored):
            return stored_whole(value)  # a tensor, or the extra state of a module
        # Another rank has the values. Here, torch only needs a tensor of the same shape.
        if name in lacking and isinstance(own[name], Tensor):
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
    # If the numbers of parameters differ, `optimizer.load_state_dict` raises ValueError after this hook.
    places = dict(zip(numbers, held, strict=False)) if len(numbers) == len(held) else {}

    def read(number: Any, entry: Any) -> Any:
        p = places.get(number)
        return stored_whole(entry) if p is None else map_kind(Stored, lambda each: each.like(p), entry)

    state = {number: read(number, entry) for number, entry in saved["state"].items()}
    return {**{name: stored_whole(value) for name, value in saved.items() if name != "state"}, "state": state}


def compare_states(own: dict[str, Any], saved: dict[str, Any]) -> None:
    """Raise CheckpointError unless a saved state_dict has the names and shapes of this model's state_dict."""
    there, here = ({name: tuple(getattr(value, "shape", ())) for name, value in side.items()} for side in (saved, own))
    if other := [name for name in here | there if here.get(name) != there.get(name)]:
        shapes = f"{there.get(other[0], 'none')} in it and {here.get(other[0], 'none')} in this model"
        raise CheckpointError(
            f"the checkpoint belongs to another model: {other[0]} has shape {shapes} ({some(other)} differ). Resume "
            "with the program that saved it."
        )
