"""Gather the state of a user's loop, and restore it.

The state is collected from the loop's objects, and restored into them.

Tested in tests/script/test_checkpoint.py, and what lies beside the loop in tests/script/test_saved_loop.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshwise.data.generators import GLOBAL
from meshwise.engine.engine import Engine
from meshwise.recovery.collect import held_of, state_of
from meshwise.recovery.loading import whole as read_whole
from meshwise.recovery.resume_changes import honour
from meshwise.recovery.state import compare_states, load_model, load_optimizer
from meshwise.script.distributed_loader import DistributedLoader
from meshwise.script.extra_values import restore_extra, state_of_extra
from meshwise.script.things import compare, folded
from meshwise.spec.errors import UsageError
from meshwise.tracking import tracking
from meshwise.workers.join import rank_context

Loaders = DistributedLoader | Sequence[DistributedLoader] | None
"""The loader of the training loop, or a sequence of this loader and further loaders that the same loop reads."""


@dataclass(frozen=True)
class LoopParts:
    """The parts of a training loop that are saved in its state.

    things: the models, optimizers and schedulers, by kind and then by name.
    made_with: settings of the program, which are compared with the saved ones when the loop resumes."""

    engine: Engine
    things: Mapping[str, dict[str, Any]]
    loaders: Sequence[DistributedLoader]
    extra: Any
    made_with: Mapping[str, Any]


def loaders_of(given: Loaders) -> tuple[DistributedLoader, ...]:
    """Return the loaders given as `loader=`. Raise UsageError for any object that is not a loader of
    `mw.distribute`."""
    several = () if given is None else tuple(given) if isinstance(given, list | tuple) else (given,)
    for each in several:
        if not isinstance(each, DistributedLoader):
            raise UsageError(
                f"mw.checkpoint: loader= is a {type(each).__name__}, but must be the DataLoader of mw.distribute. "
                "A loader that reads ahead does not know which batches the program has trained on."
            )
    return several


def says_beside(parts: LoopParts) -> str:
    """Return a warning if the loop of `mw.checkpoint` also reads a loader whose position is not saved. Return an empty
    string otherwise. parts: has the loaders whose positions are saved."""
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
        "model": folded({name: of_model(each) for name, each in models.items()}),
        "optimizer": {n: {"kind": type(o).__name__, "state": o.state_dict()} for n, o in optimizers.items()},
        "scheduler": {name: each.state_dict() for name, each in schedulers.items()},
        "loader": parts.loaders[0].state_dict() if parts.loaders else None,
        "beside": [each.state_beside() for each in parts.loaders[1:]],
        "extra": state_of_extra(parts.extra),
        "random": {rank: random},
        "step": step,
        "made_with": parts.made_with,
        "logged": tracking.logged() if rank == 0 else {},
    }


def restore(parts: LoopParts, folder: Path, tree: Mapping[str, Any]) -> int:
    """Restore all parts of the loop from `tree`, which was saved in `folder`. Return the number of the last step in
    it."""
    models, optimizers, schedulers = (parts.things[kind] for kind in ("model", "optimizer", "scheduler"))
    saved = {"": tree["model"]} if tree["models"] == [""] else tree["model"]
    compare(folder, parts.things, {**tree, "model": saved})
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
    restore_extra(parts.extra, rest["extra"])
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
