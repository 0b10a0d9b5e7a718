"""Collect a sharded state on rank 0's host, as on one device.

Sharded tensors become whole tensors.

Parts of tensors are gathered in buckets. If an optimizer is divided over ranks, each rank holds the optimizer state of
some parameters only. The ranks that hold the other entries send these to rank 0.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from meshwise.torch_compat.tree import map_leaves, map_tensors, tensors_in
from meshwise.transfer import collectives, stages
from meshwise.transfer.sharded import full_tensor, full_tensors


def collected(thing: Any) -> Any:
    """Gather `thing` on rank 0: a state_dict, or dicts and lists of state_dicts. Collective.

    Rank 0 gets the same structure with whole tensors on the CPU in place of sharded tensors. Other ranks get None.
    Every rank must pass the same structure. Only the state_dict of an optimizer may lack entries, because each rank may
    hold the state of some parameters only.
    """
    first, tree = collectives.get_rank(collectives.everyone()) == 0, map_leaves(_joined, thing, _is_state_of_optimizer)
    parts = {id(tensor): tensor for tensor in tensors_in(tree)}  # by id, so that tied tensors stay one tensor
    whole: dict[int, Tensor] = {}
    for key, full in zip(parts, full_tensors(list(parts.values())), strict=True):
        whole[key] = full.detach().cpu() if first else torch.empty(0)
    return map_tensors(lambda tensor: whole[id(tensor)], tree) if first else None


def held_of(model: nn.Module) -> dict[str, Any]:
    """Return the entries of the model's state_dict that this rank's pipeline stage holds."""
    lacking = stages.lacks(model)
    return {name: value for name, value in model.state_dict(keep_vars=True).items() if name not in lacking}


def state_of(model: nn.Module) -> dict[str, Any]:
    """Return the model's state_dict. In a pipeline, its first rank gets the entries of all stages."""
    state, pipe = model.state_dict(keep_vars=True), stages.pipe()
    if pipe is None:
        return state
    return state | _joined_over({n: t for n, t in held_of(model).items() if isinstance(t, Tensor)}, pipe.group)


def _is_state_of_optimizer(thing: Any) -> bool:
    facts = thing if isinstance(thing, dict) else {}
    return isinstance(facts.get("state"), dict) and isinstance(facts.get("param_groups"), list)


def _joined(optimizer: dict[str, Any]) -> dict[str, Any]:
    """Return an optimizer's state_dict that is complete on rank 0."""
    pipe, state = stages.pipe(), optimizer["state"]
    if pipe is not None:
        state = _joined_over(state, pipe.group)
    return {**optimizer, "state": dict(sorted(_joined_over(state).items()))}


def _joined_over(own: dict[Any, Any], group: collectives.Group = None) -> dict[Any, Any]:
    """Return all ranks' entries on rank 0 of the group. The first rank that has an entry sends it. Collective."""
    rank = collectives.get_rank(group)
    forms = map_tensors(lambda tensor: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta"), own)
    ranks = collectives.gather_objects(forms, group)
    joined = {key: entry for key, entry in own.items() if key in ranks[0]}
    for key in sorted({key for held in ranks for key in held} - ranks[0].keys()):
        owner = next(rank for rank, held in enumerate(ranks) if key in held)
        device = collectives.device_of(group)
        if rank == 0:
            fresh = map_tensors(partial(torch.empty_like, device=device), ranks[owner][key])
            for tensor in tensors_in(fresh):
                collectives.receive(tensor, owner, group)
            joined[key] = map_tensors(Tensor.cpu, fresh)
        elif rank == owner:
            for tensor in tensors_in(own[key]):
                collectives.send(full_tensor(tensor.detach()).to(device).contiguous(), 0, group)
    return joined
