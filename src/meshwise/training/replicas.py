"""What replicas hold is alike on every rank: sums of parameters and buffers, which are compared now and then.

Gradients are reduced, so parameters part only where something changes them apart: noise that each rank draws for
itself, or a rule that looks at this rank's samples. The sums travel with the loss (agreed.py) at backward 2, 4, 8 …
of each program.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from meshwise.compat.fake import rehearsing
from meshwise.spec.user_code import user_place
from meshwise.training.program import Program
from meshwise.training.settings import Settings

PARAMETERS, BUFFER = "sum of parameters", "sum of a buffer"
FAR = 1e-6  # of a sum: devices of different kinds may round a step otherwise
BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
NORMS = (*BATCH_NORMS, nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)


def sums_of(program: Program) -> Settings:
    """Sums of what the program's replicas hold."""
    if program.plan is None or rehearsing():
        return ()
    named = [
        (f"{place}.{name}".lstrip("."), buffer)
        for model in program.models
        for place, module in model.named_modules()
        if not isinstance(module, NORMS)
        for name, buffer in module.named_buffers(recurse=False)
        if buffer.is_floating_point()
    ]
    buffers = tuple((BUFFER, name, _sum([buffer])) for name, buffer in named)
    if program.plan.parameters_divided:  # each rank has its own part of them
        return buffers
    return (PARAMETERS, "", _sum(program.named_parameters().values())), *buffers


def _sum(tensors: Iterable[Tensor]) -> float:
    return float(torch.stack([t.detach().abs().sum(dtype=torch.float64) for t in tensors]).sum())


def _alike(one: float, other: float) -> bool:
    """NaN is like NaN, and like nothing else: a rank alone may have come to it."""
    return math.isclose(one, other, rel_tol=FAR) or (math.isnan(one) and math.isnan(other))


def parted(ranks: Sequence[Settings], kind: str) -> str:
    """Where the ranks' parameters, or one of their buffers, differ: one sentence; empty where they do not."""
    for rank, settings in enumerate(ranks):
        for (name, whose, value), (_, _, of_rank_0) in zip(settings, ranks[0], strict=False):
            if name == kind and not _alike(value, of_rank_0):
                sums = f"the sum of their sizes is {value:.9g} on rank {rank} and {of_rank_0:.9g} on rank 0"
                return f"{user_place()}: {(_PARTED if kind == PARAMETERS else _BUFFER).format(name=whose, sums=sums)}"
    return ""


_PARTED = (
    "the ranks' parameters have parted: {sums}. Between mw.backward and the next batch something changes parameters or "
    "gradients on each rank apart: random numbers, of which each rank draws its own in the loop over a loader, or what "
    "depends on this rank's samples. Draw noise for parameters alike: torch.randn(p.shape, generator=g), where g is a "
    "torch.Generator that is seeded alike on every rank."
)
_BUFFER = (
    "the ranks' buffers {name} differ: the model updates it from this rank's samples alone, so it is not that of one "
    "device, and rank 0's is saved. Let the model compute it from sums over the ranks (mw.sum)."
)
