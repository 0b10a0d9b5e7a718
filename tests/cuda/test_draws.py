"""Draws on a GPU: what a program draws is alike on all ranks, what its models draw is keyed by batch and rank."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import meshwise as mw
from meshwise.transfer.sharded import full_tensor

pytestmark = pytest.mark.evidence(
    "what a program draws is alike on every rank, and what its models draw is keyed by batch and rank"
)


class Doubled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(x * self.weight, 0.5)


def split() -> Any:
    """(what dropout leaves of a batch, of the next; what the program itself has drawn around them)"""
    torch.manual_seed(1)
    model = mw.distribute(Doubled().cuda(), view="rank")
    kept, own = [], []
    for _ in range(2):
        own.append(torch.rand(3, device="cuda").tolist())
        kept.append(model(mw.split(torch.ones(8, 64, device="cuda"))).tolist())
    return kept, [*own, torch.rand(3, device="cuda").tolist()]


def test_a_batch_in_pieces_has_its_draws_on_the_gpu(gpus: Any) -> None:
    (alone, on_one), *_ = gpus(1).run(split)
    (first, on_first), (second, on_second) = gpus(2).run(split)
    assert on_one == on_first == on_second and len({str(each) for each in on_one}) == 3
    assert first[0] == alone[0][:4] and first[0] != second[0]
    assert first[0] != first[1]


class Noisy(torch.optim.SGD):
    """Each step moves the parameters by noise, which is drawn on their device."""

    def step(self, closure: Any = None) -> Any:
        for p in self.param_groups[0]["params"]:
            p.data += 0.1 * torch.randn_like(p)
        return super().step(closure)


def stepped() -> Any:
    """(the model after some noisy steps, what the loop drew behind each of them)"""
    torch.manual_seed(1)
    model, loader = nn.Linear(4, 2).cuda(), DataLoader(TensorDataset(torch.ones(8, 4)), batch_size=4)
    optimizer = Noisy(model.parameters(), 0.1)
    model, optimizer, loader = mw.distribute(model, optimizer, loader, view="rank")
    drawn = []
    for (x,) in loader:
        mw.backward(model(x).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        drawn.append(torch.rand(3, device=x.device).tolist())
    return [p.tolist() for p in model.parameters()], drawn


def test_an_optimizer_draws_alike_on_gpus_and_leaves_the_draws_of_each_rank_as_they_were(gpus: Any) -> None:
    """Its step seeded the device for all ranks alike, and left it so: each rank's noise behind it was the same."""
    (want, _), *_ = gpus(1).run(stepped)
    (first, of_first), (second, of_second) = gpus(2).run(stepped)
    assert first == second and torch.allclose(torch.tensor(first[0]), torch.tensor(want[0]), atol=1e-6)
    assert all(a != b for a, b in zip(of_first, of_second, strict=True))


def built(deferred: bool) -> Any:
    """(the values of a model that is made on the GPU, what is drawn there after it); deferred: part by part, under a
    plan of shards, where rank 0 alone has the right seed."""
    torch.manual_seed(mw.rank() if deferred else 0)
    with mw.deferred() if deferred else contextlib.nullcontext(), torch.device("cuda"):
        model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 2))
        nn.init.normal_(model[2].bias)
    if deferred:
        mw.distribute(model, plan=mw.Plan(shard=2), view="rank")
    whole = {name: full_tensor(p.detach()).tolist() for name, p in model.named_parameters()}
    assert all(p.device.type == "cuda" for p in model.parameters())
    return whole, torch.rand(3, device="cuda").tolist()


def test_a_deferred_model_has_the_values_that_it_would_draw_on_the_gpu(gpus: Any) -> None:
    pool = gpus(2)
    assert pool.run(built, True) == pool.run(built, False)
