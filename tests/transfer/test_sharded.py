"""Sharded tensors made whole: many in one collective, each as it would be by itself."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import meshwise as mw
from meshwise.spec.plan import Plan
from meshwise.transfer import collectives
from meshwise.transfer.sharded import full_tensor, full_tensors

SHAPES = [(5, 3), (1,), (2, 2), (7,), (3, 1, 2), (4, 4)] * 10


class Many(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.held = nn.ParameterList([nn.Parameter(torch.randn(shape)) for shape in SHAPES])


def gathered(plan: Plan) -> tuple[bool, int]:
    """Whether all are equal to the bit to those gathered one by one, and how many collectives that took."""
    torch.manual_seed(0)
    want = [p.detach().clone() for p in Many().parameters()]
    torch.manual_seed(0)
    model = mw.distribute(Many(), plan=plan, view="rank")
    given = [p.detach() for p in model.parameters()]
    given = [*given[:20], torch.ones(3), *given[20:40], given[40].double(), *given[41:]]
    want = [*want[:20], torch.ones(3), *want[20:40], want[40].double(), *want[41:]]
    before = collectives.entered.total()
    found = list(full_tensors(given))
    entered = collectives.entered.total() - before
    one_by_one = [full_tensor(tensor) for tensor in given]
    same = all(torch.equal(a, b) and torch.equal(a, c) for a, b, c in zip(found, want, one_by_one, strict=True))
    return same, entered


def test_many_are_gathered_in_few_collectives(pool: Any) -> None:
    for plan in (Plan(shard=2), Plan(shard=3)):
        assert pool(plan.devices).run(gathered, plan) == [(True, 4)] * plan.devices
