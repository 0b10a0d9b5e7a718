"""Parameters that fit one bucket are averaged behind the backward: what DDP's reducer makes of them, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from meshwise.parallel.data import DataParallel
from meshwise.torch_compat import reducer
from meshwise.transfer import collectives

WAYS = (
    "whole",
    "missed by all",
    "missed by one",
    "first by none",
    "kept",
    "weighed",
    "kept and weighed",
    "kept and frozen",
    "added up",
)
STEPS = 4
WIDE = 160  # its gradients become parts of the bucket


def trained(way: str, ddp: bool, width: int) -> list[Tensor | None]:
    """In a worker: gradients, parameters and means after each step."""
    assigned = reducer._assigned
    if ddp:
        reducer._assigned = lambda ready, bucket_mb: [[0], [1]]  # said to be two buckets: DDP makes them
    try:
        torch.manual_seed(0)
        model = nn.ModuleList(nn.Linear(width, width) for _ in range(3)).double()
        reduction = DataParallel(list(model.named_parameters()), bucket_mb=25, piggyback_loss=True)
        found: list[Tensor | None] = []
        held: list[tuple[Tensor, Tensor]] = []
        rank = collectives.get_rank()
        for step in range(STEPS):
            torch.manual_seed(10 * step + rank)
            for reduce in (False, True) if way.startswith("kept") else (True,):
                model[1].requires_grad_(not (reduce and way.endswith("frozen")))
                loss = loss_of(model, way, step, rank)
                factor = (lambda step=step: torch.tensor(1.5 + step)) if way.endswith("weighed") and reduce else None
                value = loss.detach() if factor is None else None
                mean = reduction.backward(loss, reduce=reduce, factor=factor, value=value if reduce else None)
                found.append(mean)
            if step == 0:
                kinds = [type(group.reducer) for group in reduction._groups]
                assert (reducer.PlainBucket in kinds) is not ddp, kinds
            for p in model.parameters():
                found += [None if p.grad is None else p.grad.clone(), p.detach().clone()]
                if p.grad is not None:
                    p.data -= 0.1 * p.grad
                if way != "added up" or step == 2:
                    held += [] if p.grad is None else [(p.grad, p.grad.clone())]
                    p.grad = None
        assert all(torch.equal(gradient, as_it_was) for gradient, as_it_was in held), "a kept gradient was overwritten"
        return found
    finally:
        reducer._assigned = assigned


def loss_of(model: nn.ModuleList, way: str, step: int, rank: int) -> Tensor:
    x = torch.randn(4, model[0].in_features, dtype=torch.float64)
    a, b, c = (layer(x).square().mean() for layer in model)
    missed = (way == "missed by all" and step == 2) or (way == "missed by one" and step >= 1 and rank == 1)
    return a + c if missed or (way == "first by none" and step == 0) else a + b * 2 + c


@pytest.mark.parametrize("width", [5, WIDE])
@pytest.mark.parametrize("size", [2, 3])
def test_one_bucket_is_what_ddp_makes_of_it(size: int, width: int, pool: Any) -> None:
    for way in WAYS:
        ours = pool(size).run(trained, way, False, width)
        for own, theirs in zip(ours, pool(size).run(trained, way, True, width), strict=True):
            assert all(a is None or torch.equal(a, b) for a, b in zip(own, ours[0], strict=True)), (way, "diverged")
            for number, (a, b) in enumerate(zip(own, theirs, strict=True)):
                assert (a is None) == (b is None) and (a is None or torch.equal(a, b)), (way, number, a, b)


def places() -> tuple[int, bool]:
    """In a worker: in how many places the gradients of six steps lay, and whether a view of one kept its values."""
    model = nn.Linear(WIDE, WIDE)
    reduction = DataParallel(list(model.named_parameters()), bucket_mb=25)
    found, held, before = set[int](), None, torch.empty(0)
    for step in range(8):
        reduction.backward(model(torch.full((2, WIDE), float(step))).square().sum())
        assert model.weight.grad is not None
        if step > 1:
            found.add(model.weight.grad.data_ptr())
        if step == 4:
            held, before = model.weight.grad.numpy()[:1], model.weight.grad[:1].clone()
        model.zero_grad()
    return len(found), held is not None and bool((torch.from_numpy(held) == before).all())


def test_the_memory_of_gradients_is_used_again_unless_the_program_holds_it(pool: Any) -> None:
    assert pool(2).run(places) == [(2, True), (2, True)]
