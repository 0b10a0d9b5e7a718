"""Models of bench/gpu.py on which no constant of the planner was fitted: random data, twelve steps."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import meshwise as mw

SMALL = os.environ.get("MESHWISE_SMALL_GPU_JOBS") == "1"
STEPS, WORDS = (3, 100) if SMALL else (12, 32000)


class Block(nn.Module):
    """Attention and a feed-forward part."""

    def __init__(self, width: int, heads: int, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(self.before(x)).chunk(3, -1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=self.causal).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.between(x))))


class Transformer(nn.Module):
    """A decoder, or an encoder."""

    def __init__(self, layers: int, width: int, length: int, causal: bool) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(WORDS, width), nn.Parameter(torch.zeros(length, width))
        self.blocks = nn.ModuleList(Block(width, max(1, width // 64), causal) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, WORDS, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.place
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Convolutions(nn.Module):
    """Four halvings, two convolutions each."""

    def __init__(self) -> None:
        super().__init__()
        sizes = (3, 16) if SMALL else (3, 64, 128, 256, 512)
        layers = [
            nn.Sequential(
                nn.Conv2d(a, b, 3, stride=2, padding=1), nn.BatchNorm2d(b), nn.ReLU(), nn.Conv2d(b, b, 3, 1, 1)
            )
            for a, b in itertools.pairwise(sizes)
        ]
        self.layers, self.head = nn.Sequential(*layers), nn.Linear(sizes[-1], 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(x).mean((-1, -2)))


def _words(layers: int, width: int, length: int, batch: int, causal: bool = True) -> mw.Job:
    if SMALL:
        layers, width, length, batch = 1, 64, 16, 2

    def data() -> TensorDataset:
        tokens = torch.randint(WORDS, (STEPS * batch, length + 1))
        return TensorDataset(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())

    def loss(model: Callable[..., Any], given: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(model(given[0]).flatten(0, 1), given[1].flatten())

    return _job(lambda: Transformer(layers, width, length, causal), data, loss, batch)


def _job(model: Callable[[], nn.Module], data: Callable[[], TensorDataset], loss: Any, batch: int) -> mw.Job:
    return mw.Job(
        name="gpu-job", model=model, data=data, loss=loss, batch_size=batch, epochs=1,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, 1e-4),
    )  # fmt: skip


def _images() -> mw.Job:
    batch, side = (2, 16) if SMALL else (64, 224)

    def data() -> TensorDataset:
        return TensorDataset(torch.randn(STEPS * batch, 3, side, side), torch.randint(10, (STEPS * batch,)))

    def loss(model: Callable[..., Any], given: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(model(given[0]), given[1])

    return _job(Convolutions, data, loss, batch)


def decoder() -> mw.Job:
    """134 million parameters."""
    return _words(12, 768, 1024, 8)


def wide() -> mw.Job:
    """Few wide layers."""
    return _words(4, 2048, 512, 8)


def long() -> mw.Job:
    """Long sequences."""
    return _words(6, 512, 4096, 2)


def encoder() -> mw.Job:
    """Attention without a mask."""
    return _words(12, 768, 384, 16, causal=False)


def convolutions() -> mw.Job:
    """Images of 224 pixels."""
    return _images()
