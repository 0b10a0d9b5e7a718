"""What `mw.distribute` was given that `mw.checkpoint` was not: a loop would lose it in silence.

Tested in tests/training/test_lost_in_a_loop.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from meshwise.training.loop_state import LoopState


def kept_by(states: Iterable[LoopState]) -> list[Any]:
    """The program's things that these states save."""
    return [each for state in states for each in state.keeps()]


def forgotten(
    given: Sequence[Any],
    things: Mapping[str, dict[str, Any]],
    models: Iterable[nn.Module],
    optimizers: Iterable[Optimizer],
    schedulers: Iterable[Any],
) -> str:
    """A sentence on those of these, which the program trains with, that no state has; empty for none. given: what the
    states have. things: of the last of them, by kind and name."""
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
        f"mw.checkpoint: mw.distribute was given {which}, which this state lacks: after a restart that begins anew, "
        f"silently. Write mw.checkpoint(…, {write})."
    )


def _written(kind: str, count: int) -> str:
    return kind if count == 1 else f"[{', '.join(f'{kind}{number}' for number in range(1, count + 1))}]"
