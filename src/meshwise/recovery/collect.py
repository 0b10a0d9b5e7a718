"""Collect: what ranks hold in parts, as one device would hold it, on rank 0's host.

Parts of tensors are gathered in buckets. Of a divided optimizer each rank holds the state of its own
parameters; what rank 0 lacks is sent to it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from meshwise.compat.tree import map_leaves, map_tensors, tensors_in
from meshwise.transfer import collectives
from meshwise.transfer.sharded import full_tensors


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
    first, tree = collectives.get_rank(collectives.everyone()) == 0, map_leaves(_joined, thing, _is_state_of_optimizer)
    parts = {id(tensor): tensor for tensor in tensors_in(tree)}  # tied tensors stay tied
    whole: dict[int, Tensor] = {}
    for key, full in zip(parts, full_tensors(list(parts.values())), strict=True):
        whole[key] = full.detach().cpu() if first else torch.empty(0)
    return map_tensors(lambda tensor: whole[id(tensor)], tree) if first else None


def _is_state_of_optimizer(thing: Any) -> bool:
    facts = thing if isinstance(thing, dict) else {}
    return isinstance(facts.get("state"), dict) and isinstance(facts.get("param_groups"), list)


def _joined(optimizer: dict[str, Any]) -> dict[str, Any]:
    """An optimizer's state_dict, complete on rank 0."""
    state: dict[Any, Any] = optimizer["state"]
    ranks = collectives.gather_objects({key: map_tensors(_shape_of, entry) for key, entry in state.items()})
    complete = dict(state)
    for key in sorted({key for forms in ranks for key in forms} - ranks[0].keys()):
        owner = next(rank for rank, forms in enumerate(ranks) if key in forms)
        if collectives.get_rank() == 0:
            complete[key] = _received(ranks[owner][key], owner)
        elif collectives.get_rank() == owner:
            map_tensors(_sent, state[key])
    own = complete if collectives.get_rank() == 0 else {k: v for k, v in state.items() if k in ranks[0]}
    return {**optimizer, "state": dict(sorted(own.items()))}


def _shape_of(tensor: Tensor) -> Any:
    return _Shape(tuple(tensor.shape), tensor.dtype, tensor.device.type)


def _received(form: Any, owner: int) -> Any:
    def receive(shape: _Shape) -> Tensor:
        return collectives.receive(torch.empty(shape.shape, dtype=shape.dtype, device=shape.device), owner)

    return map_leaves(receive, form, lambda leaf: isinstance(leaf, _Shape))


def _sent(tensor: Tensor) -> Tensor:
    collectives.send(tensor.contiguous(), 0)
    return tensor
