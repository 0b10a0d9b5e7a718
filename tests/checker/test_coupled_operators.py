"""Losses that couple the samples of a batch are told from those that only weigh them, by their operators."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from meshwise.checker.coupled_operators import Coupled, noting_coupled, taken_together

Loss = Callable[[Tensor, Tensor], Tensor]


def barlow_twins(z: Tensor, t: Tensor) -> Tensor:
    z = (z - z.mean(0)) / z.std(0)
    return ((z.T @ z.cos()) / len(z) - torch.eye(8)).pow(2).sum()


def covariance_of_vicreg(z: Tensor, t: Tensor) -> Tensor:
    return (z.T @ z).pow(2).sum()


def variance_of_vicreg(z: Tensor, t: Tensor) -> Tensor:
    return F.relu(1 - torch.sqrt(z.var(0) + 1e-4)).mean()


def simclr(z: Tensor, t: Tensor) -> Tensor:
    return F.cross_entropy(F.normalize(z) @ F.normalize(z.sin()).T, torch.arange(len(z)))


def triplet(z: Tensor, t: Tensor) -> Tensor:
    far = (z[:, None] - z[None]).pow(2).sum(-1)
    same = t[:, None] == t[None]
    return F.relu((far * same).amax(1) - (far + 9 * same).amin(1) + 1).mean()


def entropy_of_the_mean(z: Tensor, t: Tensor) -> Tensor:
    mean = z.softmax(1).mean(0)
    return (mean * mean.log()).sum()


def spread_of_one_number(z: Tensor, t: Tensor) -> Tensor:
    return z[:, 0].std()


def hardest_half(z: Tensor, t: Tensor) -> Tensor:
    return F.cross_entropy(z, t, reduction="none").topk(len(z) // 2).values.mean()


def neighbours(z: Tensor, t: Tensor) -> Tensor:
    return (z * z.roll(1, 0)).sum(1).mean()


def shuffled(z: Tensor, t: Tensor) -> Tensor:
    return (z * z[torch.randperm(len(z))]).mean()


def root_of_a_mean(z: Tensor, t: Tensor) -> Tensor:
    return (z[:, 0] - t).pow(2).mean().sqrt()


def weighted_classes(z: Tensor, t: Tensor) -> Tensor:
    return F.cross_entropy(z, t, weight=torch.arange(1.0, 9.0))


def masked(z: Tensor, t: Tensor) -> Tensor:
    mask = (t > 3).to(z.dtype)
    return (F.cross_entropy(z, t, reduction="none") * mask).sum() / mask.sum()


def of_each_sample(z: Tensor, t: Tensor) -> Tensor:
    own = F.gaussian_nll_loss(z, z.sin(), z.var(1, keepdim=True))
    return own + (z.sort(1).values.sum(1) - z.logsumexp(1) + z.gather(1, t[:, None])[:, 0]).mean()


def _found(loss: Loss) -> list[str]:
    sides = list[Coupled]()
    for rows in (24, 10):
        z, t = torch.randn(rows, 8, requires_grad=True), torch.randint(8, (rows,))
        sides.append({})
        with noting_coupled(rows, sides[-1], lambda: None):
            loss(z, t)
    return [each.text for each in taken_together(*sides)]


COUPLED = (barlow_twins, covariance_of_vicreg, variance_of_vicreg, simclr, triplet, entropy_of_the_mean)
COUPLED += (spread_of_one_number, hardest_half, neighbours, shuffled, root_of_a_mean)


@pytest.mark.parametrize("loss", COUPLED, ids=lambda loss: loss.__name__)
def test_a_loss_that_couples_samples_is_seen_with_its_line(loss: Loss) -> None:
    found = _found(loss)
    assert found and found[0].startswith(("tests/checker/test_coupled_operators.py:", __file__))


@pytest.mark.parametrize("loss", [weighted_classes, masked, of_each_sample], ids=lambda loss: loss.__name__)
def test_a_loss_that_weighs_samples_is_not_taken_for_one(loss: Loss) -> None:
    assert _found(loss) == []


def test_other_operators_are_let_through() -> None:
    found: Coupled = {}
    with noting_coupled(4, found, lambda: None):
        torch.empty(4).copy_(torch.ones(4)).clamp_(0.0, 1.0)
        torch.ones(4).index_select(0, torch.tensor([1]))
        torch.ones(4, 3)[:, torch.tensor([1, 2])].sum()
        torch._foreach_add([torch.ones(4)], 1.0)
    assert found == {}
