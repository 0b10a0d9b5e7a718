"""What every rank should have alike, compared over the ranks: rank 0 alone would not show what another got wrong."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from meshwise.equivalence.gathered import to_rank_0
from meshwise.equivalence.prints import print_of
from meshwise.equivalence.seen import Named, Side
from meshwise.equivalence.sizes import finite, rounded_to
from meshwise.transfer.collectives import gather_objects
from meshwise.workers.join import join

LACKS = float("inf")  # how far a rank is from the others that lacks what they have


def of_any_rank(named: dict[str, Any]) -> dict[str, Any]:
    """What any rank has, by name, from the first that has it: a divided optimizer keeps its state on one rank."""
    names = gather_objects(list(named))
    earlier = {name for others in names[: join().world.rank] for name in others}
    parts = to_rank_0({name: value for name, value in named.items() if name not in earlier})
    return {name: value for part in reversed(parts) for name, value in part.items()}


def tensors_apart(what: str, named: Mapping[str, Tensor], *, divided: bool = False) -> dict[str, float]:
    """How far ranks are from the first in each tensor, relative to its size there, by `what NAME`; those that agree are
    left out. divided: each rank may have a part of them alone. Collective; for rank 0."""
    ranks = to_rank_0({name: print_of(value.double()) for name, value in named.items()})
    found = {}
    for name in {name for prints in ranks for name in prints}:
        held = [prints[name] for prints in ranks if name in prints]
        most = LACKS
        if (divided or len(held) == len(ranks)) and all(other.shape == held[0].shape for other in held):
            apart = max(finite(float((other - held[0]).norm())) for other in held)
            most = apart / max(float(held[0].norm()), torch.finfo(torch.float64).tiny) if apart > 0 else 0.0
        if most > 0:
            found[f"{what} {name}"] = most
    return found


def numbers_apart(what: str, named: Mapping[str, float]) -> dict[str, float]:
    """The same for numbers. Collective; every rank gets it."""
    ranks = gather_objects(dict(named))
    found = {}
    for name in {name for numbers in ranks for name in numbers}:
        held = [numbers.get(name) for numbers in ranks]
        first = held[0]
        if first is None or any(other is None for other in held):
            found[f"{what} {name}"] = LACKS
            continue
        size = max(abs(first), torch.finfo(torch.float64).tiny)
        # the same number that is none on every rank is alike
        most = max(0.0 if other is None or str(other) == str(first) else abs(other - first) / size for other in held)
        if most != 0:
            found[f"{what} {name}"] = finite(most)
    return found


def models_apart(side: Side) -> dict[str, float]:
    """How far ranks are apart in what a side begins with: tied weights, classes of modules, parameters, buffers.
    Collective; what one of them lacks is known to every rank, the rest to rank 0."""
    found: dict[str, float] = {}
    ranks = gather_objects((side.tied, side.modules, list(side.initial)))
    for tied, modules, names in ranks:
        for name in set(names) ^ set(ranks[0][2]):
            found[f"parameter {name}"] = LACKS
        for group in set(tied) ^ set(ranks[0][0]):
            found[f"tied weights {' = '.join(group)}"] = LACKS
        for name in modules.keys() | ranks[0][1].keys():
            if modules.get(name) != ranks[0][1].get(name):
                found[f"module {name}"] = LACKS
    found |= tensors_apart("parameter", side.initial)
    return found | tensors_apart("buffer", side.initial_buffers)


def cannot_train(apart: Mapping[str, float]) -> bool:
    """Whether ranks have other parameters than each other, so that they would wait for one another, or fail."""
    return any(far == LACKS and not name.startswith(("module ", "buffer ")) for name, far in apart.items())


def by_tensor(state: Mapping[str, Named]) -> Named:
    """An optimizer's state as tensors named `PARAMETER KEY`."""
    return {f"{name} {key}": value for name, tensors in state.items() for key, value in tensors.items()}


def coarse_on_any(parameters: Named) -> dict[str, str]:
    """Parameters that some rank holds in values of 16 bits, and which. (32 bits hold the start.) Collective."""
    ranks = gather_objects({name: rounded_to(p) for name, p in parameters.items()})
    return {name: dtype for found in ranks for name, dtype in found.items() if dtype.endswith("16")}
