"""Jobs of 50 steps whose numbers a smaller plan must not change: see memory_limit.py."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Subset

import meshwise as mw
from meshwise.jobs.registry import find_job


def job(name: str, model: Any, loss: Any, data: tuple[Tensor, ...], **more: Any) -> mw.Job:
    """A job of 50 steps of 16 samples."""
    return mw.Job(
        name=name,
        model=model,
        loss=loss,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
        scheduler=lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 50),
        data=lambda: data,
        batch_size=16,
        epochs=5,
        **more,
    )


SOURCE = torch.Generator().manual_seed(0)
IMAGES = torch.randn(160, 3, 8, 8, generator=SOURCE)
LABELS = torch.randint(0, 4, (160,), generator=SOURCE)
TOKENS = torch.randint(0, 32, (160, 13), generator=SOURCE)
ROWS = torch.randn(160, 12, generator=SOURCE)


class Residual(nn.Module):
    """A block of a ResNet."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.one, self.two = (nn.Conv2d(channels, channels, 3, padding=1, bias=False) for _ in range(2))
        self.norm1, self.norm2 = nn.BatchNorm2d(channels), nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        return functional.relu(x + self.norm2(self.two(functional.relu(self.norm1(self.one(x))))))


def resnet_model() -> nn.Module:
    """Batch norms see a microbatch."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), *(Residual(8) for _ in range(3)), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4)
    )


class Tokens(nn.Module):
    """A transformer with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, 16)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True) for _ in range(3)
        )
        self.head = nn.Linear(16, 32)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def class_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Cross entropy."""
    return functional.cross_entropy(model(batch[0]), batch[1])


def token_loss(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    """Of the next token."""
    x = batch[0]
    return functional.cross_entropy(model(x[:, :-1]).flatten(0, 1), x[:, 1:].flatten())


def pair_loss(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    """Over all pairs of a microbatch, as contrastive losses are."""
    x = functional.normalize(model(batch[0]), dim=1)
    y = functional.normalize(model(batch[0].flip(1)), dim=1)
    return functional.cross_entropy(x @ y.T / 0.1, torch.arange(len(x), device=x.device))


def perceptron() -> nn.Module:
    """No batch norm and no dropout: its microbatches may be halved."""
    return nn.Sequential(nn.Linear(12, 32), nn.GELU(), nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 8))


def row_loss(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    """A mean over samples."""
    return model(batch[0]).square().mean()


perceptrons = job("perceptron", perceptron, row_loss, (ROWS,))
resnet = job("resnet", resnet_model, class_loss, (IMAGES, LABELS))
transformer = job("transformer", Tokens, token_loss, (TOKENS,))
pairs = job("pairs", perceptron, pair_loss, (ROWS,))


def fifty_steps(name: str, batch_size: int) -> mw.Job:
    """A built-in job on as much of its data as 50 steps read."""
    whole = find_job(name)
    data, samples = whole.data(), 50 * batch_size
    few = tuple(t[:samples] for t in data) if isinstance(data, tuple) else Subset(data, range(samples))
    return replace(whole, data=lambda: few, test=None, best=None, batch_size=batch_size, epochs=1)


mlp = fifty_steps("mlp", 64)
gpt = fifty_steps("gpt", 8)
mnist_mlp = fifty_steps("mnist-mlp", 64)
mnist_cnn = fifty_steps("mnist-cnn", 32)
