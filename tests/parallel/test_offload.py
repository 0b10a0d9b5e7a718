"""Offload: what goes to the host is what the backward needs, without the parameters."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from meshwise.parallel.apply import apply
from meshwise.parallel.offload import Moved, offload_activations
from meshwise.spec.plan import Plan
from meshwise.spec.world import World
from meshwise.transfer import collectives
from tests.parallel.zoo import Transformer, batches, build


def kept_bytes(model: nn.Module, batch: Tensor) -> int:
    """Bytes that a forward keeps for its backward, parameters and what is small left out: counted by torch's hooks."""
    total = 0

    def keep(tensor: Tensor) -> Tensor:
        nonlocal total
        source = tensor if tensor._base is None else tensor._base
        total += tensor.nbytes if not isinstance(source, nn.Parameter) and tensor.nbytes >= 1024 else 0
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        model(batch)
    return total


def moved_bytes(plan: Plan) -> tuple[int, int]:
    """Bytes that a forward under `plan` sends to the host, and those that a plain one keeps."""
    (batch, _), *_ = batches("transformer", 1)
    plain = kept_bytes(build("transformer"), batch)
    model: Any = build("transformer")
    applied = apply(model, plan, World(rank=collectives.own_rank(), size=collectives.world_size()))
    moved: Moved = model.forward.args[-1]
    applied.backward(model(batch).sum())
    with torch.no_grad():
        model(batch)
    return moved.bytes, plain


def test_all_that_a_forward_keeps_goes_to_the_host() -> None:
    moved, kept = moved_bytes(Plan(offload=("activations",)))
    assert moved == kept > 100_000


def test_gathered_parameters_do_not(pool: Any) -> None:
    for moved, kept in pool(2).run(moved_bytes, Plan(shard=2, offload=("activations",))):
        assert moved == kept


def test_the_copies_are_what_the_backward_sees() -> None:
    model = build("transformer")
    offload_activations(model)
    (batch, _), *_ = batches("transformer", 1)
    loss = model(batch).square().mean()
    plain = build("transformer")
    plain(batch).square().mean().backward()
    loss.backward()
    for a, b in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)  # type: ignore[arg-type]
    assert type(model) is Transformer and list(model.state_dict()) == list(plain.state_dict())


def test_models_in_a_list_are_each_laid_into_it() -> None:
    models = nn.ModuleList([nn.Linear(64, 64), nn.Linear(64, 64)])
    moved = offload_activations(models)
    (models[1](models[0](torch.ones(8, 64)))).sum().backward()
    assert moved.tensors == 2 and moved.bytes == 2 * 8 * 64 * 4
