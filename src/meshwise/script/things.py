"""Check what `mw.checkpoint` is given against what was distributed.

What is not given would silently be lost on a restart.

Tested in tests/script/test_checkpoint.py and test_lost_in_a_loop.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer

from meshwise.spec.errors import CheckpointError, UsageError

Things = Any
"""One object, or a list or dict of objects."""


def named(things: Things) -> dict[str, Any]:
    """Return a dict of the objects by the names under which their states are saved. A single object has an empty
    name."""
    if things is None:
        return {}
    if isinstance(things, list | tuple):
        return {str(number): each for number, each in enumerate(things)}
    return {str(name): each for name, each in things.items()} if isinstance(things, dict) else {"": things}


def folded(states: dict[str, Any]) -> Any:
    """Return the dict of the models' state_dicts by name. If there is a single model without a name, return only its
    state_dict."""
    return states[""] if list(states) == [""] else states


def check(things: Mapping[str, dict[str, Any]]) -> None:
    """Raise UsageError if an object was given as a model, optimizer or scheduler, but is not one."""
    for kind, cls in (("model", nn.Module), ("optimizer", Optimizer), ("scheduler", None)):
        for each in things[kind].values():
            fits = isinstance(each, cls) if cls is not None else hasattr(each, "load_state_dict")
            if not fits:
                raise UsageError(f"mw.checkpoint: {kind}= takes no {type(each).__name__}. Pass it in the dict extra=.")


def compare(folder: Path, things: Mapping[str, dict[str, Any]], tree: Mapping[str, Any]) -> None:
    """Raise CheckpointError if the objects passed to `mw.checkpoint` do not fit the state saved in `folder`. Their
    names must be the same as in the saved state, and so must the classes of optimizers.

    things: the objects passed to `mw.checkpoint`, by kind (such as `model`) and name.
    tree: the saved state, by kind and name."""
    for kind, own in things.items():
        if own.keys() != tree[kind].keys():
            raise CheckpointError(
                f"{folder} was saved with {len(tree[kind])} values of {kind}=, but mw.checkpoint was now "
                f"passed {len(own)}. Pass the same objects as when the state was saved, or use another folder."
            )
    for name, optimizer in things["optimizer"].items():
        if (kind := tree["optimizer"][name]["kind"]) != type(optimizer).__name__:
            raise CheckpointError(f"{folder} is for optimizer {kind}, not {type(optimizer).__name__}. Use {kind}.")


def kept_by(states: Iterable[Any]) -> list[Any]:
    """Return the program's objects that `mw.checkpoint` saves. states: what the calls of `mw.checkpoint` have
    returned."""
    return [each for state in states for each in state.keeps()]


def forgotten(
    given: Sequence[Any],
    things: Mapping[str, dict[str, Any]],
    models: Iterable[nn.Module],
    optimizers: Iterable[Optimizer],
    schedulers: Iterable[Any],
) -> str:
    """Return a warning about objects that the program trains with, but that no call of `mw.checkpoint` saves. Return an
    empty string if all objects are saved.

    given: the objects passed to any call of `mw.checkpoint`.
    things: the objects passed to the last call alone, by kind (such as `model`) and name.
    models, optimizers, schedulers: the objects that the program trains with."""
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
