"""What optimizers step with, which a scheduler or the program sets on each rank: alike on all of them, or they part.

Tested in tests/training/test_agreed.py.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from typing import Any, TypeAlias

from torch.optim.lr_scheduler import ReduceLROnPlateau

Settings: TypeAlias = tuple[tuple[str, str, Any], ...]
"""(name of the setting, whose it is, value)"""
NAMES = {"lr": "lr", "momentum": "momentum", "betas": "betas", "weight_decay": "weight decay"}
PLATEAU = "best value"
NAMED = {*NAMES.values(), PLATEAU}


def settings_differ(ranks: Sequence[Settings]) -> str:
    """How the settings of some rank differ from rank 0's, in words; empty where they do not."""
    for rank, settings in enumerate(ranks):
        if len(settings) != len(ranks[0]):  # what the program has let go is not garbage on all ranks at once
            continue
        for mine, other in zip(ranks[0], settings, strict=True):
            if mine != other and mine[0] in NAMED:
                return _sentence(rank, other, mine)
    return ""


def _sentence(rank: int, setting: tuple[str, str, Any], of_rank_0: tuple[str, str, Any]) -> str:
    name, whose, value = setting
    text = f"rank {rank} has {name} {_shown(value)}, rank 0 {_shown(of_rank_0[2])} ({whose}): the ranks would part. "
    if any(issubclass(type(thing), ReduceLROnPlateau) for thing in gc.get_objects()):
        return text + (
            "ReduceLROnPlateau was given each rank's own number. Give it the same on all ranks: "
            "scheduler.step(mw.mean(loss)), or what mw.backward gives."
        )
    return text + "Give the scheduler the same number on all ranks, or set it to the same on all."


def _shown(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)
