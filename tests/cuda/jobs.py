"""Small jobs for a GPU that is not there: what a plan can divide is in each, and the last batch is not full."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import meshwise as mw

WORDS, WIDTH, LENGTH, SAMPLES, TESTED = 61, 64, 12, 35, 13

Batch = tuple[Tensor, Tensor]


class Block(nn.Module):
    """No bias of the keys: its gradient is rounding alone."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH)
        self.up, self.down, self.dropout = nn.Linear(WIDTH, 128), nn.Linear(128, WIDTH), nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (4, -1)).transpose(1, 2) for t in self.qkv(self.before(x)).chunk(3, -1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.dropout(self.out(mixed))
        return x + self.dropout(self.down(F.gelu(self.up(self.between(x)))))


class Decoder(nn.Module):
    """Four blocks, and a head that shares the embedding's weight."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(WORDS, WIDTH), nn.Parameter(torch.randn(LENGTH, WIDTH) / 8)
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(4))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.place
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Stacked(nn.Module):
    """Experts whose parameters are stacked, as transformers 5 writes them."""

    def __init__(self) -> None:
        super().__init__()
        self.num_experts = 4
        self.up = nn.Parameter(torch.randn(4, WIDTH, WIDTH) / 8)
        self.down = nn.Parameter(torch.randn(4, WIDTH, WIDTH) / 8)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        out = torch.zeros_like(hidden_states)
        for expert in range(self.num_experts):
            token, place = torch.where(top_k_index == expert)
            made = torch.tanh(hidden_states[token] @ self.up[expert].T) @ self.down[expert].T
            out = out.index_add(0, token, made * top_k_weights[token, place, None])
        return out


class Mixture(nn.Module):
    """Two mixtures of four experts, of which each token has two."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.routers = nn.ModuleList(nn.Linear(WIDTH, 4, bias=False) for _ in range(2))
        self.mixtures = nn.ModuleList(Stacked() for _ in range(2))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens).flatten(0, 1)
        for router, mixture in zip(self.routers, self.mixtures, strict=True):
            weights, index = router(x).softmax(-1).topk(2)
            x = x + mixture(x, index, weights)
        return self.head(x).unflatten(0, tokens.shape)


class Sometimes(nn.Module):
    """A parameter that some batches of a rank do not reach, and some no rank's."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(WORDS, WIDTH), nn.Parameter(torch.randn(LENGTH, WIDTH) / 8)
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        if int(tokens[0, 0]) % 2:
            x = x + self.place
        return self.head(torch.tanh(x))


class Images(nn.Module):
    """Convolutions, one of them in groups, and batch norms."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)
        self.conv2, self.norm2 = nn.Conv2d(8, 16, 3, groups=2), nn.BatchNorm2d(16)
        self.head = nn.Linear(16, WORDS)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.norm1(self.conv1(x))), 2)
        return self.head(F.relu(self.norm2(self.conv2(x))).mean((2, 3)))


def error(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch[0]).flatten(0, -2), batch[1].flatten())


def sentences(count: int) -> Batch:
    tokens = torch.randint(0, WORDS, (count, LENGTH), generator=torch.Generator().manual_seed(1))
    return tokens, (7 * tokens + 3) % WORDS


def pictures(count: int) -> Batch:
    drawn = torch.Generator().manual_seed(2)
    return torch.randn(count, 3, 12, 12, generator=drawn), torch.randint(0, WORDS, (count,), generator=drawn)


def job_of(model: Callable[[], nn.Module], data: Callable[[int], Batch] = sentences, **more: Any) -> mw.Job:
    settings: dict[str, Any] = {
        "optimizer": lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
        "scheduler": lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.7),
        "batch_size": 8,
        "clip_norm": 0.5,
    }
    return mw.Job(
        "small",
        model,
        error,
        data=lambda: data(SAMPLES),
        test=lambda: data(TESTED),
        metrics=lambda model, batch: {"error": error(model, batch)},
        **{**settings, **more},
    )


def decoder(dropout: float = 0.0, **more: Any) -> mw.Job:
    return job_of(lambda: Decoder(dropout), **more)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


JOBS: dict[str, Callable[[], mw.Job]] = {
    "decoder": decoder,
    "with dropout": lambda: decoder(0.2),
    "sometimes": lambda: job_of(Sometimes),
    "images": lambda: job_of(Images, pictures, optimizer=sgd),
    "experts": lambda: job_of(Mixture),
}
