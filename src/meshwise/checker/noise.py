"""Find parameter elements whose gradient is zero except for rounding.

Examples are the bias in front of a batch norm, and the bias of the keys in attention.

Adam divides such a gradient by its size, so these elements take meaningless steps, and are not compared. Values that
depend on them without changing a gradient (a running mean, an evaluation) are compared: one device runs once more, and
takes over the plan's values of these elements.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from meshwise.checker.difference import largest
from meshwise.checker.model_state import named_parameters
from meshwise.checker.trace import Named, Noise, Trace

NOISE = 1e-8  # gradients up to this fraction of the largest one count as rounding


def note_noise(noise: Named, mine: Named, others: Named) -> None:
    """Mark in `noise` the parameter elements whose gradient is only rounding."""
    most = largest(mine.values())
    for name in mine.keys() & others.keys():
        a, b = mine[name].abs(), others[name].abs()
        if a.shape == b.shape:
            larger = torch.maximum(a, b)
            small = (larger <= NOISE * most) & (larger > 0)
            noise[name] = small | noise[name] if name in noise else small


def noise_of(reference: Trace, actual: Trace) -> list[Noise]:
    """Return, for each step, masks of the elements whose gradients are only rounding, and the plan's parameters."""
    noise: dict[str, Tensor] = {}
    found = list[Noise]()
    for mine, other in zip(reference.steps, actual.steps, strict=False):
        note_noise(noise, mine.gradients, other.gradients)
        there = {name: (mask, other.parameters[name]) for name, mask in noise.items() if name in other.parameters}
        found.append({name: both for name, both in there.items() if bool(both[0].any())})
    return found if any(found) else []


def take_noise(model: nn.Module, noise: Sequence[Mapping[str, tuple[Tensor, Tensor]]], step: int) -> None:
    """Overwrite the parameter elements that `noise` marks for step `step` with the values in `noise`."""
    if step < len(noise):
        with torch.no_grad():
            for name, p in named_parameters(model):
                if name in noise[step]:
                    mask, values = (each.to(p.device) for each in noise[step][name])
                    p.copy_(torch.where(mask, values.to(p.dtype), p))
