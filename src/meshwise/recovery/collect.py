"""Collect: what ranks hold in parts, as one device would hold it, on rank 0's host.

Parts of a tensor are gathered one tensor at a time. Of a divided optimizer each rank holds the state of its own
parameters; what rank 0 lacks is sent to it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from meshwise.compat.tree import map_leaves, map_tensors
from meshwise.transfer import collectives
from meshwise.transfer.sharded import full_tensor


@dataclass(frozen=True)
class _Shape:
    """A tensor that another rank holds."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: str


def collected(thing: Any) -> Any:
    """`thing` (a state_dict, or a tree of such) with whole tensors on the CPU; None on ranks other than 0. Collective.

    Every rank gives a tree of the same form; optimizers' states may have entries on some ranks alone.
    """
    seen: dict[int, Tensor] = {}
    first = collectives.get_rank() == 0

    def gathered(tensor: Tensor) -> Tensor:
        if id(tensor) not in seen:  # tied tensors stay tied
            full = full_tensor(tensor)
            seen[id(tensor)] = full.detach().cpu() if first else torch.empty(0)
        return seen[id(tensor)]

    result = map_tensors(gathered, _joined(thing))
    return result if first else None


def _joined(thing: Any) -> Any:
    """`thing` with optimizers' states complete on rank 0."""
    if not isinstance(thing, dict):
        return [_joined(part) for part in thing] if type(thing) is list else thing
    if isinstance(thing.get("state"), dict) and isinstance(thing.get("param_groups"), list):
        return {**thing, "state": _joined_state(thing["state"])}
    return {key: _joined(value) for key, value in thing.items()} if type(thing) is dict else thing


def _joined_state(state: dict[Any, Any]) -> dict[Any, Any]:
    ranks = collectives.gather_objects({key: map_tensors(_shape_of, entry) for key, entry in state.items()})
    complete = dict(state)
    for key in sorted({key for forms in ranks for key in forms} - ranks[0].keys()):
        owner = next(rank for rank, forms in enumerate(ranks) if key in forms)
        if collectives.get_rank() == 0:
            complete[key] = _received(ranks[owner][key], owner)
        elif collectives.get_rank() == owner:
            map_tensors(_sent, state[key])
    own = complete if collectives.get_rank() == 0 else {k: v for k, v in state.items() if k in ranks[0]}
    return dict(sorted(own.items()))


def _shape_of(tensor: Tensor) -> Any:
    return _Shape(tuple(tensor.shape), tensor.dtype, tensor.device.type)


def _received(form: Any, owner: int) -> Any:
    def receive(shape: _Shape) -> Tensor:
        return collectives.receive(torch.empty(shape.shape, dtype=shape.dtype, device=shape.device), owner)

    return map_leaves(receive, form, lambda leaf: isinstance(leaf, _Shape))


def _sent(tensor: Tensor) -> Tensor:
    collectives.send(tensor.contiguous(), 0)
    return tensor
