"""Gather the state of a user's loop, and restore it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Sized
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from meshwise.spec.errors import CheckpointError, UsageError
from meshwise.training.data.generators import global_states, set_global_states
from meshwise.training.engine.engine import Engine
from meshwise.training.recovery.loading import whole as read_whole
from meshwise.training.recovery.resume_changes import honour, made_with
from meshwise.training.recovery.state import restore_objects, tree_of_objects
from meshwise.training.script.distributed_loader import DistributedLoader
from meshwise.training.tracking import tracking
from meshwise.workers.join import rank_context

Loaders = DistributedLoader | Sequence[DistributedLoader] | None
"""The loader of the training loop, or a sequence of it and other loaders that the loop reads."""


@dataclass(frozen=True)
class LoopParts:
    """The parts of a training loop that are saved in its state."""

    engine: Engine
    things: Mapping[str, dict[str, Any]]
    loaders: Sequence[DistributedLoader]
    extra: Any
    made_with: Mapping[str, Any]


def parts_of(engine: Engine, given: Mapping[str, Things], loader: Loaders, extra: Any) -> LoopParts:
    """Return the parts of a loop that `mw.checkpoint` was given. Raise UsageError for other objects."""
    things = {kind: _named(each) for kind, each in given.items()}
    for kind, cls in (("model", nn.Module), ("optimizer", Optimizer), ("scheduler", object)):
        for each in things[kind].values():
            if not isinstance(each, cls) or not hasattr(each, "load_state_dict"):
                raise UsageError(f"mw.checkpoint: {kind}= takes no {type(each).__name__}. Pass it in the dict extra=.")
    loaders = list(_named(loader).values())
    for each in loaders:
        if not isinstance(each, DistributedLoader):
            raise UsageError(
                f"mw.checkpoint: loader= is a {type(each).__name__}, but must be the DataLoader of mw.distribute. "
                "A loader that reads ahead does not know which batches the program has trained on."
            )
    data = loaders[0].dataset if loaders else None
    samples = len(data) if isinstance(data, Sized) else None
    now = made_with(things["optimizer"], loaders[0].batch_size if loaders else None, samples)
    return LoopParts(engine, things, loaders, extra, now)


def says_beside(parts: LoopParts) -> str:
    """Return a warning if the loop of `mw.checkpoint` also reads a loader whose position is not saved."""
    engine = parts.engine
    read = [each for each in engine.given.loaders if each.in_batch and each.given_at >= engine.phases.done - 1]
    if not parts.loaders or all(each in parts.loaders for each in read):
        return ""
    return (
        "mw.checkpoint: the loop also reads a second loader, whose position is not saved. After a restart, that "
        "loader begins its epoch again. Write mw.checkpoint(…, loader=[loader, other])."
    )


def random_of(engine: Engine) -> tuple[Any, ...]:
    """Return the states of the program's random generators."""
    with engine.generator.drawing():
        return global_states()


def tree_of(parts: LoopParts, step: int, random: tuple[Any, ...]) -> dict[str, Any]:
    """Return this rank's part of the loop's state after step `step`."""
    rank = rank_context().world.rank
    return {
        **tree_of_objects(parts.things),
        "loaders": [each.state_beside() if n else each.state_dict() for n, each in enumerate(parts.loaders)],
        "extra": _state_of_extra(parts.extra),
        "random": {rank: random},
        "step": step,
        "made_with": parts.made_with,
        "logged": tracking.logged() if rank == 0 else {},
    }


def restore(parts: LoopParts, folder: Path, tree: Mapping[str, Any]) -> int:
    """Restore all parts of the loop from `tree`, saved in `folder`, and return the number of steps."""
    things = parts.things
    for kind, own in things.items():
        names = tree["models"] if kind == "model" else tree[kind].keys()
        if own.keys() != set(names):
            raise CheckpointError(
                f"{folder} was saved with {len(names)} values of {kind}=, but mw.checkpoint was now passed {len(own)}. "
                "Pass the same objects as when the state was saved, or use another folder."
            )
    restore_objects(things, tree)
    rest = read_whole({name: tree[name] for name in ("loaders", "extra", "random", "step", "made_with", "logged")})
    _restore_extra(parts.extra, rest["extra"])
    for loader, place in zip(parts.loaders, rest["loaders"], strict=False):
        loader.load_state_dict(place)
    if len(rest["loaders"]) < len(parts.loaders):
        parts.engine.notify(
            f"mw.checkpoint: the state has the positions of {len(rest['loaders'])} of {len(parts.loaders)} loaders. "
            "The other loaders begin a new epoch."
        )
    index = parts.loaders[0].place[1] if parts.loaders else 0
    given = things["optimizer"], rest["made_with"], parts.made_with, parts.engine.notify
    honour(*given, index=index, scheduled=bool(things["scheduler"]))
    states = rest["random"].get(rank_context().world.rank, next(iter(rest["random"].values())))
    with parts.engine.generator.drawing():
        set_global_states(states)
    tracking.go_on_after(rest["logged"])
    return int(rest["step"])


Things = Any
"""One object, or a list or dict of objects."""


def _named(things: Things) -> dict[str, Any]:
    """Return the objects by the names under which their states are saved. A single object has an empty name."""
    if things is None:
        return {}
    if isinstance(things, list | tuple):
        return {str(number): each for number, each in enumerate(things)}
    return {str(name): each for name, each in things.items()} if isinstance(things, dict) else {"": things}


def forgotten(engine: Engine, given: Sequence[Any]) -> str:
    """Return a warning about objects that the program trains with, but `mw.checkpoint` does not save."""
    saved = {id(p) for each in given if isinstance(each, nn.Module) for p in each.parameters()}
    known = {id(each) for each in given}
    lost: list[tuple[str, Any]] = [
        ("model", model)
        for model in engine.program.models
        if any(p.requires_grad and id(p) not in saved for p in model.parameters())
    ]
    lost += [("optimizer", each) for each in engine.program.optimizers if id(each) not in known]
    lost += [("scheduler", each) for each in engine.given.schedulers if id(each) not in known]
    which = ", ".join(f"{type(each).__name__} ({kind})" for kind, each in lost)
    return which and (
        f"mw.checkpoint: mw.distribute was passed {which}, but mw.checkpoint was not, so its state is not saved. Pass "
        "it to mw.checkpoint too."
    )


def _state_of_extra(extra: Any) -> Any:
    """Return a copy of `extra` to save, with state_dicts in place of objects that have one."""
    if isinstance(extra, dict):
        return {name: each.state_dict() if hasattr(each, "state_dict") else each for name, each in extra.items()}
    return None if extra is None else extra.state_dict()


def _restore_extra(extra: Any, saved: Any) -> None:
    if isinstance(extra, dict):
        extra |= {name: _filled(extra.get(name), value) for name, value in (saved or {}).items()}
    elif saved is not None:
        _filled(extra, saved)


def _filled(own: Any, value: Any) -> Any:
    """Restore one value, in place if possible, and return it."""
    if hasattr(own, "load_state_dict"):
        own.load_state_dict(value)
        return own
    if isinstance(own, Tensor) and isinstance(value, Tensor) and own.shape == value.shape:
        own.data.copy_(value)
        return own
    if type(own) is list and type(value) is list:
        own[:] = value
    elif type(own) is dict and type(value) is dict:
        own.clear()
        own.update(value)
    else:
        return value
    return own
