"""Gather the state of a user's loop, and restore it."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence, Sized
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from meshwise.spec.errors import CheckpointError, UsageError
from meshwise.training.data.generators import GLOBAL
from meshwise.training.engine.engine import Engine
from meshwise.training.recovery.collect import held_of, state_of
from meshwise.training.recovery.loading import whole as read_whole
from meshwise.training.recovery.resume_changes import honour, made_with
from meshwise.training.recovery.state import compare_states, load_model, load_optimizer
from meshwise.training.script.distributed_loader import DistributedLoader
from meshwise.training.tracking import tracking
from meshwise.workers.join import rank_context

Loaders = DistributedLoader | Sequence[DistributedLoader] | None
"""The loader of the training loop, or a sequence of this loader and further loaders that the same loop reads."""


@dataclass(frozen=True)
class LoopParts:
    """The parts of a training loop that are saved in its state."""

    engine: Engine
    things: Mapping[str, dict[str, Any]]
    loaders: Sequence[DistributedLoader]
    extra: Any
    made_with: Mapping[str, Any]


def parts_of(engine: Engine, given: Mapping[str, Things], loader: Loaders, extra: Any) -> LoopParts:
    """Return the parts of a loop that were given to `mw.checkpoint`. Raise UsageError for objects of another kind."""
    loaders, things = _loaders_of(loader), {kind: _named(each) for kind, each in given.items()}
    _check(things)
    data = loaders[0].dataset if loaders else None
    samples = len(data) if isinstance(data, Sized) else None
    now = made_with(things["optimizer"], loaders[0].batch_size if loaders else None, samples)
    return LoopParts(engine, things, loaders, extra, now)


def _loaders_of(given: Loaders) -> tuple[DistributedLoader, ...]:
    several = () if given is None else tuple(given) if isinstance(given, list | tuple) else (given,)
    for each in several:
        if not isinstance(each, DistributedLoader):
            raise UsageError(
                f"mw.checkpoint: loader= is a {type(each).__name__}, but must be the DataLoader of mw.distribute. "
                "A loader that reads ahead does not know which batches the program has trained on."
            )
    return several


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
        return tuple(handle.state() for handle in GLOBAL)


def tree_of(parts: LoopParts, step: int, random: tuple[Any, ...], *, whole: bool) -> dict[str, Any]:
    """Return this rank's part of the loop's state after step `step`. whole: whether to include the values that only
    rank 0 writes, on behalf of all ranks."""
    of_model, rank = state_of if whole else held_of, rank_context().world.rank
    models, optimizers, schedulers = (parts.things[kind] for kind in ("model", "optimizer", "scheduler"))
    return {
        "models": list(models),
        "model": _folded({name: of_model(each) for name, each in models.items()}),
        "optimizer": {n: {"kind": type(o).__name__, "state": o.state_dict()} for n, o in optimizers.items()},
        "scheduler": {name: each.state_dict() for name, each in schedulers.items()},
        "loader": parts.loaders[0].state_dict() if parts.loaders else None,
        "beside": [each.state_beside() for each in parts.loaders[1:]],
        "extra": _state_of_extra(parts.extra),
        "random": {rank: random},
        "step": step,
        "made_with": parts.made_with,
        "logged": tracking.logged() if rank == 0 else {},
    }


def restore(parts: LoopParts, folder: Path, tree: Mapping[str, Any]) -> int:
    """Restore all parts of the loop from `tree`, which was saved in `folder`."""
    models, optimizers, schedulers = (parts.things[kind] for kind in ("model", "optimizer", "scheduler"))
    saved = {"": tree["model"]} if tree["models"] == [""] else tree["model"]
    _compare(folder, parts.things, {**tree, "model": saved})
    for name, model in models.items():
        compare_states(model.state_dict(), saved[name])
        load_model(model, saved[name])
    for name, optimizer in optimizers.items():
        load_optimizer(optimizer, tree["optimizer"][name]["state"])
    later: dict[str, Any] = {"beside": [], "logged": {}, "made_with": None}  # older states have none
    later = {name: tree.get(name, none) for name, none in later.items()}
    rest = read_whole({name: tree[name] for name in ("scheduler", "extra", "loader", "random", "step")} | later)
    for name, scheduler in schedulers.items():
        scheduler.load_state_dict(rest["scheduler"][name])
    _restore_extra(parts.extra, rest["extra"])
    _restore_loaders(parts, [*([rest["loader"]] if rest["loader"] is not None else []), *rest["beside"]])
    index = parts.loaders[0].place[1] if parts.loaders else 0
    given = optimizers, rest["made_with"], parts.made_with, parts.engine.notify
    honour(*given, index=index, scheduled=bool(schedulers))
    states = rest["random"].get(rank_context().world.rank, next(iter(rest["random"].values())))
    with parts.engine.generator.drawing():
        for handle, state in zip(GLOBAL, states, strict=True):
            handle.set_state(state)
    tracking.go_on_after(rest["logged"])
    return int(rest["step"])


def _restore_loaders(parts: LoopParts, places: Sequence[dict[str, Any]]) -> None:
    for loader, place in zip(parts.loaders, places, strict=False):
        loader.load_state_dict(place)
    if parts.loaders and len(places) < len(parts.loaders):
        parts.engine.notify(
            f"mw.checkpoint: the state has the positions of {len(places)} of {len(parts.loaders)} loaders. The other "
            "loaders begin a new epoch."
        )


Things = Any
"""One object, or a list or dict of objects."""


def _named(things: Things) -> dict[str, Any]:
    """Return the objects by the names under which their states are saved. A single one has an empty name."""
    if things is None:
        return {}
    if isinstance(things, list | tuple):
        return {str(number): each for number, each in enumerate(things)}
    return {str(name): each for name, each in things.items()} if isinstance(things, dict) else {"": things}


def _folded(states: dict[str, Any]) -> Any:
    return states[""] if list(states) == [""] else states


def _check(things: Mapping[str, dict[str, Any]]) -> None:
    for kind, cls in (("model", nn.Module), ("optimizer", Optimizer), ("scheduler", None)):
        for each in things[kind].values():
            fits = isinstance(each, cls) if cls is not None else hasattr(each, "load_state_dict")
            if not fits:
                raise UsageError(f"mw.checkpoint: {kind}= takes no {type(each).__name__}. Pass it in the dict extra=.")


def _compare(folder: Path, things: Mapping[str, dict[str, Any]], tree: Mapping[str, Any]) -> None:
    """Raise CheckpointError if what `mw.checkpoint` is given has other names or classes than the saved state."""
    for kind, own in things.items():
        if own.keys() != tree[kind].keys():
            raise CheckpointError(
                f"{folder} was saved with {len(tree[kind])} values of {kind}=, but mw.checkpoint was now "
                f"passed {len(own)}. Pass the same objects as when the state was saved, or use another folder."
            )
    for name, optimizer in things["optimizer"].items():
        if (kind := tree["optimizer"][name]["kind"]) != type(optimizer).__name__:
            raise CheckpointError(f"{folder} is for optimizer {kind}, not {type(optimizer).__name__}. Use {kind}.")


def forgotten(
    given: Sequence[Any],
    things: Mapping[str, dict[str, Any]],
    models: Iterable[nn.Module],
    optimizers: Iterable[Optimizer],
    schedulers: Iterable[Any],
) -> str:
    """Return a warning about objects that the program trains with, but that no call of `mw.checkpoint` saves."""
    saved = {id(p) for each in given if isinstance(each, nn.Module) for p in each.parameters()}
    known = {id(each) for each in given}
    lost: dict[str, list[Any]] = {
        "model": [m for m in models if any(p.requires_grad and id(p) not in saved for p in m.parameters())],
        "optimizer": [each for each in optimizers if id(each) not in known],
        "scheduler": sorted(
            (each for each in schedulers if id(each) not in known), key=lambda each: type(each).__name__
        ),
    }
    if not any(lost.values()):
        return ""
    which = ", ".join(f"{type(each).__name__} ({kind})" for kind, several in lost.items() for each in several)
    write = ", ".join(
        f"{kind}={_written(kind, len(several) + len(things[kind]))}" for kind, several in lost.items() if several
    )
    return (
        f"mw.checkpoint: mw.distribute was passed {which}, but mw.checkpoint was not, so its state is not saved. "
        f"Write mw.checkpoint(…, {write})."
    )


def _written(kind: str, count: int) -> str:
    return kind if count == 1 else f"[{', '.join(f'{kind}{number}' for number in range(1, count + 1))}]"


def _state_of_extra(extra: Any) -> Any:
    """Return a copy of `extra` to save, with state_dicts in place of objects that have one."""
    if isinstance(extra, dict):
        return {
            name: _state_of_extra(value) if hasattr(value, "state_dict") else value for name, value in extra.items()
        }
    return None if extra is None else extra.state_dict()


def _restore_extra(extra: Any, saved: Any) -> None:
    if not isinstance(extra, dict):
        if extra is not None and saved is not None:
            extra.load_state_dict(saved)
        return
    for name, value in (saved or {}).items():
        extra[name] = _filled(extra.get(name), value)


def _filled(own: Any, value: Any) -> Any:
    """Restore one value."""
    if hasattr(own, "load_state_dict"):
        own.load_state_dict(value)
        return own
    if isinstance(own, Tensor) and isinstance(value, Tensor) and own.shape == value.shape:
        own.data.copy_(value)
        return own
    if type(own) is list and type(value) is list:
        own[:] = [_filled(a, b) for a, b in zip(own, value, strict=True)] if len(own) == len(value) else value
        return own
    if type(own) is dict and type(value) is dict:
        filled = {name: _filled(own.get(name), each) for name, each in value.items()}
        own.clear()
        own.update(filled)
        return own
    return value


def unread_numbers(*, held: int, extra: Any) -> str:
    """Return a warning if the program keeps no reference to the dict `extra`, so that it can never read or change the
    dict's numbers."""
    names = [str(n) for n, v in extra.items() if isinstance(v, int | float)] if type(extra) is dict else []
    if not names or held > _HELD_ONCE:
        return ""
    return (
        f"mw.checkpoint: the script keeps no reference to the dict of extra=. Each save writes the first value of "
        f"{', '.join(names)}, and the script cannot read a restored value. Write state = {{…}} and "
        f"mw.checkpoint(…, extra=state), and read and change state[{names[0]!r}] in the loop."
    )


class _Holder:
    def __init__(self) -> None:
        self.extra: Any = {}


_HOLDER = _Holder()
_HELD_ONCE = sys.getrefcount(_HOLDER.extra)  # what Python says of a dict that one attribute holds
