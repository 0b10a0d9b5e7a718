"""Trains models that begin to mix rows at a later call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.training.whole.shared import Distribute, mlp, step, usual, weights


class Switching(nn.Module):
    """Keeps rows apart at its first two calls."""

    def __init__(self, mixed: Callable[[nn.Module, Tensor, bool], Tensor]) -> None:
        super().__init__()
        self.body, self.mixed, self.calls = mlp(), mixed, 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.mixed(self.body, x, self.calls > 2)


def trained(distribute: Distribute, mixed: Callable[[nn.Module, Tensor, bool], Tensor]) -> Any:
    """Two calls, and the 64 within which a switch must be caught."""
    model, optimizer, loader = usual(distribute, Switching(mixed))
    losses = [step(F.cross_entropy(model(x), y), optimizer) for _ in range(22) for x, y in loader]
    return losses, model.calls, weights(model)


def rows_compared_later(distribute: Distribute) -> Any:
    return trained(distribute, lambda body, x, later: body(x) + (x @ x.T).softmax(1) @ body(x) if later else body(x))


def outputs_centred_later(distribute: Distribute) -> Any:
    return trained(distribute, lambda body, x, later: body(x) - body(x).mean(0) if later else body(x))


def inputs_centred_later(distribute: Distribute) -> Any:
    return trained(distribute, lambda body, x, later: body(x - x.mean(0) if later else x))


def constant_mean_later(distribute: Distribute) -> Any:
    def mixed(body: nn.Module, x: Tensor, later: bool) -> Tensor:
        z = body(x)
        with torch.no_grad():
            shift = z.mean(0) if later else torch.zeros(3)
        return z - shift

    return trained(distribute, mixed)


def branch_by_a_mean_later(distribute: Distribute) -> Any:
    return trained(distribute, lambda body, x, later: body(x).tanh() if later and x.mean() > 0 else body(x))


def norm_over_rows_later(distribute: Distribute) -> Any:
    return trained(distribute, lambda body, x, later: F.normalize(body(x), dim=0 if later else 1))


class ReadsItsLoss(nn.Linear):
    """Mixes rows, by as many operators, once the loss that it was given is small."""

    last: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        made = super().forward(x)
        later = self.last is not None and self.last.item() < 0.9
        return made - (made.mean(0, keepdim=True) if later else made.mean(1, keepdim=True))


def loss_read_later(distribute: Distribute) -> Any:
    model, optimizer, loader = usual(distribute, nn.Sequential(ReadsItsLoss(6, 3)))
    losses = []
    for _ in range(5):  # 15 calls: at its 16th, a proven call is tested again
        for x, y in loader:
            loss = F.cross_entropy(model(x), y)
            losses.append(step(loss, optimizer))
            model[0].last = loss
    return losses
