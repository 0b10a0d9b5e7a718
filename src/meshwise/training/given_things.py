"""What `mw.checkpoint` is given: models, optimizers and schedulers, by name.

Tested in tests/training/test_checkpoint.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer

from meshwise.spec.errors import CheckpointError, UsageError

Things = Any
"""One thing, or a list or dict of them."""


def named(things: Things) -> dict[str, Any]:
    """By the names that the state has; one thing has the name ''."""
    if things is None:
        return {}
    if isinstance(things, list | tuple):
        return {str(number): each for number, each in enumerate(things)}
    return {str(name): each for name, each in things.items()} if isinstance(things, dict) else {"": things}


def folded(states: dict[str, Any]) -> Any:
    """Of one model its state_dict itself."""
    return states[""] if list(states) == [""] else states


def check(things: Mapping[str, dict[str, Any]]) -> None:
    """Raises UsageError for what is given under another's name."""
    for kind, cls in (("model", nn.Module), ("optimizer", Optimizer), ("scheduler", None)):
        for each in things[kind].values():
            fits = isinstance(each, cls) if cls is not None else hasattr(each, "load_state_dict")
            if not fits:
                raise UsageError(f"mw.checkpoint: {kind}= is a {type(each).__name__}. Give it as extra=, by a name.")


def compare(folder: Path, things: Mapping[str, dict[str, Any]], tree: Mapping[str, Any]) -> None:
    """Raises CheckpointError where what was saved in `folder`, by name, is not what is given."""
    for kind, own in things.items():
        if own.keys() != tree[kind].keys():
            raise CheckpointError(
                f"{folder}: its state has {len(tree[kind])} of what is given as {kind}=, and here are {len(own)}. "
                "Give mw.checkpoint what it was given when that was saved, or use another folder."
            )
    for name, optimizer in things["optimizer"].items():
        if (kind := tree["optimizer"][name]["kind"]) != type(optimizer).__name__:
            raise CheckpointError(f"{folder}: its optimizer is {kind}, and here {type(optimizer).__name__}.")
