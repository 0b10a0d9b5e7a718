"""Gives the programs of this room their data, nets and usual lines."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, TensorDataset

Distribute = Callable[..., Any]


def rows(samples: int = 21, features: int = 6, classes: int = 3) -> TensorDataset:
    """Rows with a label that a line divides, alike at each call."""
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(samples, features, generator=generator)
    return TensorDataset(x, (x @ torch.randn(features, classes, generator=generator)).argmax(1))


def binary(samples: int = 21, labels: int = 1) -> TensorDataset:
    """Rows with labels of zeros and ones, fewer ones than zeros."""
    x, _ = rows(samples).tensors
    return TensorDataset(x, (x[:, :labels] + x[:, 3:4] > 0.4).to(x.dtype))


def images(samples: int = 13, size: int = 8) -> TensorDataset:
    """Pictures of one channel with a label of two."""
    x = torch.randn(samples, 1, size, size, generator=torch.Generator().manual_seed(6))
    return TensorDataset(x, (x.mean((1, 2, 3)) > 0).long())


def tokens(samples: int = 13, length: int = 6, words: int = 11) -> TensorDataset:
    """Sequences of words, each the last one plus a step of its own."""
    first = torch.arange(samples)[:, None]
    return TensorDataset((first + torch.arange(length) * (1 + first % 3)) % words)


def mlp(out: int = 3, features: int = 6) -> nn.Sequential:
    return nn.Sequential(nn.Linear(features, 8), nn.Tanh(), nn.Linear(8, out))


def usual(
    distribute: Distribute, model: nn.Module | None = None, data: Any = None, batch_size: int = 8, collate: Any = None
) -> Any:
    """A model, its optimizer and a loader that shuffles, distributed."""
    model = model or mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.5)
    loader = DataLoader(data or rows(), batch_size=batch_size, shuffle=True, collate_fn=collate)
    model, optimizer, loader = distribute(model, optimizer, loader)
    return model, optimizer, loader


def step(loss: Tensor, optimizer: Optimizer) -> float:
    """One step by hand; gives the loss to be kept."""
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


def fit(distribute: Distribute, loss: Callable[..., Tensor], model: nn.Module | None = None, data: Any = None) -> Any:
    """Two epochs of a loss of the model and the batch."""
    model, optimizer, loader = usual(distribute, model, data)
    losses = [step(loss(model, *batch), optimizer) for _ in range(2) for batch in loader]
    return losses, weights(model)


def weights(*models: nn.Module) -> list[dict[str, Tensor]]:
    return [{name: value.detach().clone() for name, value in model.state_dict().items()} for model in models]
