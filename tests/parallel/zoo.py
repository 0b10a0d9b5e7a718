"""Small models, their batches and their losses, on which every plan must compute what one device computes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

SAMPLES = 8  # of the global batch
WIDTH = 32


class Layer(nn.Module):
    """A transformer layer, with dropout where it is asked for."""

    def __init__(self, drop: float) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.query, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.rise, self.fall = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(3 * WIDTH, WIDTH)
        self.drop = nn.Dropout(drop)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.query(self.before(x)).unflatten(-1, (3, 4, WIDTH // 4)).permute(2, 0, 3, 1, 4)
        seen = nn.functional.scaled_dot_product_attention(*parts, is_causal=True)
        x = x + self.drop(self.out(seen.transpose(1, 2).flatten(2)))
        return x + self.drop(self.fall(nn.functional.gelu(self.rise(self.between(x)))))


class Transformer(nn.Module):
    """Three layers between an embedding and a head that is tied to it, and a parameter of the model's own."""

    def __init__(self, drop: float = 0.0) -> None:
        super().__init__()
        self.embed = nn.Embedding(29, WIDTH)
        self.place = nn.Parameter(torch.randn(6, WIDTH) / 10)
        self.layers = nn.ModuleList(Layer(drop) for _ in range(3))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 29, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.place
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


class Tagger(nn.Module):
    """An LSTM over words; its embedding is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(29, 7)
        self.embed.weight.requires_grad_(False)
        self.lstm = nn.LSTM(7, 9, num_layers=2, bidirectional=True, batch_first=True)
        self.tag = nn.Linear(18, 5)

    def forward(self, words: Tensor) -> Tensor:
        return self.tag(self.lstm(self.embed(words))[0])


class Tower(nn.Module):
    def __init__(self, embed: nn.Embedding) -> None:
        super().__init__()
        self.embed = embed
        self.layers = nn.ModuleList(nn.Linear(72, 72) for _ in range(2))

    def forward(self, words: Tensor) -> Tensor:
        x = self.embed(words).mean(1)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


class Towers(nn.Module):
    """Two towers over one embedding, and a part that no loss reaches."""

    def __init__(self) -> None:
        super().__init__()
        embed = nn.Embedding(29, 72)
        self.users, self.things = Tower(embed), Tower(embed)
        self.spare = nn.Linear(72, 3)

    def forward(self, words: Tensor) -> Tensor:
        return (self.users(words[:, :3]) * self.things(words[:, 3:])).sum(-1)


class ConvNet(nn.Module):
    """Convolutions with batch norm in repeated blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(
            *[nn.Sequential(nn.Conv1d(3, 3, 3, padding=1), nn.BatchNorm1d(3)) for _ in range(2)]
        )
        self.head = nn.Linear(18, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(x).flatten(1))


@dataclass(frozen=True)
class Case:
    """A model, its inputs of `SAMPLES` samples for a step, and its loss: a mean over samples."""

    make: Callable[[], nn.Module]
    inputs: Callable[[], tuple[Tensor, Tensor]]
    score: Callable[[Tensor, Tensor], Tensor] = nn.functional.mse_loss


def words_and(shape: tuple[int, ...], classes: int = 0) -> Callable[[], tuple[Tensor, Tensor]]:
    def draw() -> tuple[Tensor, Tensor]:
        target = torch.randint(classes, shape) if classes else torch.randn(shape)
        return torch.randint(29, (SAMPLES, 6)), target

    return draw


def over_classes(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())


def perceptron() -> nn.Module:
    layers = [
        nn.Linear(10, 72),
        nn.Tanh(),
        nn.Linear(72, 72),
        nn.Tanh(),
        nn.Linear(72, 72),
        nn.Tanh(),
        nn.Linear(72, 3),
    ]
    return nn.Sequential(*layers)


ZOO = {
    "mlp": Case(perceptron, lambda: (torch.randn(SAMPLES, 10), torch.randn(SAMPLES, 3))),
    "transformer": Case(Transformer, words_and((SAMPLES, 6), 29), over_classes),
    "lstm": Case(Tagger, words_and((SAMPLES, 6), 5), over_classes),
    "towers": Case(Towers, words_and((SAMPLES,))),
}


def build(name: str, dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(0)
    return ZOO[name].make().to(dtype)


def batches(name: str, count: int, dtype: torch.dtype = torch.float64) -> list[tuple[Any, Any]]:
    """`count` global batches, the same on every rank."""
    torch.manual_seed(1)
    drawn = [ZOO[name].inputs() for _ in range(count)]
    return [tuple(t.to(dtype) if t.is_floating_point() else t for t in pair) for pair in drawn]  # type: ignore[misc]
