"""What `mw.checkpoint` is given: models, optimizers and schedulers by name, and `extra=`.

Tested in tests/training/test_checkpoint.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from meshwise.spec.errors import UsageError

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


def plain_state(extra: Any) -> Any:
    """What is saved of `extra=`."""
    if isinstance(extra, dict):
        return {name: plain_state(value) if hasattr(value, "state_dict") else value for name, value in extra.items()}
    return None if extra is None else extra.state_dict()


def restore_extra(extra: Any, saved: Any) -> None:
    """Write what was saved into what is given as `extra=`."""
    if not isinstance(extra, dict):
        if extra is not None and saved is not None:
            extra.load_state_dict(saved)
        return
    for name, value in (saved or {}).items():
        if hasattr(extra.get(name), "load_state_dict"):
            extra[name].load_state_dict(value)
        elif isinstance(extra.get(name), torch.Tensor) and isinstance(value, torch.Tensor):
            extra[name].data.copy_(value)  # others may hold it
        else:
            extra[name] = value
