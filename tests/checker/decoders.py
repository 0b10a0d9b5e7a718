"""Small language models on which silent bugs of other frameworks are played: no line of them knows of a plan.

Sizes that two does not divide (33 words, samples of unequal lengths), tied weights, experts, and unequal counts of
tokens are what such bugs wait for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwise.training.job.job import Job
from tests.checker.jobs_to_check import OWN, job_of

WORDS, WIDTH, HEADS, LENGTH, IGNORED = 33, 8, 4, 8, -100


class Added(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return x + y


class Attention(nn.Module):
    """Causal. latent: keys have a part that all heads share, as in multi-head latent attention."""

    def __init__(self, latent: bool) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.q_norm = nn.RMSNorm(WIDTH // HEADS)
        self.shared, self.join = (nn.Parameter(torch.randn(WIDTH, WIDTH // HEADS)) if latent else None), Added()

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t(x).unflatten(-1, (HEADS, WIDTH // HEADS)).transpose(1, 2) for t in (self.q, self.k, self.v))
        if self.shared is not None:
            k = self.join(k, (x @ self.shared).unsqueeze(1))
        return self.o(F.scaled_dot_product_attention(self.q_norm(q), k, v, is_causal=True).transpose(1, 2).flatten(2))


class Peak(nn.Module):
    """Divides by the largest magnitude of a row."""

    def forward(self, x: Tensor) -> Tensor:
        return x / (1 + torch.linalg.vector_norm(x, ord=torch.inf, dim=-1, keepdim=True))


class Scaled(nn.Module):
    """Divides by a number that is read: the mean magnitude of all that it is given."""

    def forward(self, x: Tensor) -> Tensor:
        return x / (1 + float(x.detach().abs().mean()))


class Mlp(nn.Module):
    def __init__(self, peak: bool = False) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.peak = Peak() if peak else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.peak(self.up(x))))


class Experts(nn.Module):
    """Two experts, weighed by scores, beside one that all tokens have. counts: how often each was the first choice."""

    def __init__(self, counts: bool) -> None:
        super().__init__()
        self.route, self.scores, self.counts = nn.Parameter(torch.randn(WIDTH, 2)), nn.Identity(), counts
        self.experts, self.common = nn.ModuleList(Mlp() for _ in range(2)), Mlp()
        self.register_buffer("load", torch.zeros(2))
        self.balance: Any = None

    def forward(self, x: Tensor) -> Tensor:
        logits = x @ self.route
        self.balance = logits.logsumexp(-1).square().mean()
        scores, result = self.scores(logits.softmax(-1)), self.common(x)
        for number, expert in enumerate(self.experts):
            result = result + scores[..., number : number + 1] * expert(x)
        if self.training and self.counts:
            with torch.no_grad():
                self.load += F.one_hot(logits.argmax(-1), 2).sum((0, 1))
        return result


class Layer(nn.Module):
    def __init__(self, mlp: nn.Module, latent: bool, dropout: float) -> None:
        super().__init__()
        self.norm1, self.attn, self.norm2, self.mlp = nn.LayerNorm(WIDTH), Attention(latent), nn.LayerNorm(WIDTH), mlp
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.drop(self.mlp(self.norm2(x)))


class Decoder(nn.Module):
    """Words to scores of the next word; with `pooled`, of a class of the whole text."""

    def __init__(
        self,
        *,
        layers: int = 2,
        mlp: Callable[[], nn.Module] = Mlp,
        tied: bool = False,
        latent: bool = False,
        dropout: float = 0.0,
        times: int = 1,
        pooled: bool = False,
        scaled: bool = False,
    ) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.scaled = Scaled() if scaled else nn.Identity()
        self.layers = nn.ModuleList(Layer(mlp(), latent, dropout) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        self.times, self.pooled, self.balance_weighs = times, pooled, 0.1
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.scaled(self.embed(ids) + self.place(torch.arange(ids.shape[1])))
        for _ in range(self.times):
            for layer in self.layers:
                x = layer(x)
        x = self.norm(x)
        return self.head(x.mean(1) if self.pooled else x)


def tokens(count: int, seed: int, length: int = LENGTH, *, whole: bool = False) -> tuple[Tensor, Tensor]:
    """Texts, and their next words. whole: all are equally long."""
    draw = torch.Generator().manual_seed(seed)
    text = torch.randint(WORDS, (count, length + 1), generator=draw)
    lengths = torch.randint(2, length + 1, (count, 1), generator=draw)
    there = torch.arange(length) < lengths
    return text[:, :-1], text[:, 1:] if whole else torch.where(there, text[:, 1:], IGNORED)


def next_words(model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    ids, labels = batch
    return F.cross_entropy(model(ids).flatten(0, 1), labels.flatten()), (labels != IGNORED).sum()


def smoothed(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten(), label_smoothing=0.1)


def log_probabilities(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """As in reinforcement learning: of each word that was chosen."""
    logs = model(batch[0]).log_softmax(-1)
    return -logs.gather(-1, batch[1].unsqueeze(-1)).mean()


def balanced(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
    loss = F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())
    return loss + model.balance_weighs * model.layers[0].mlp.balance


def two_words_ahead(model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Wrong on several ranks: the second mean is over another number of words than the weight says."""
    ids, labels = batch
    logits, after = model(ids), torch.cat([labels[:, 1:], torch.full_like(labels[:, :1], IGNORED)], 1)
    second = F.cross_entropy(logits.flatten(0, 1), after.flatten())
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten()) + 0.3 * second, (labels != IGNORED).sum()


def class_of_text(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1][:, 0])


def decoder_job(
    loss: Any = next_words, *, length: int = LENGTH, clip: bool = False, **model: Any
) -> Callable[..., Job]:
    whole = loss is not next_words and loss is not two_words_ahead

    def job(seed: int = 0) -> Job:
        more = {"clip_norm": 0.1} if clip else {}
        return job_of(
            lambda: Decoder(**model),
            seed,
            loss=loss,
            data=lambda: tokens(30, 7, length, whole=whole),
            test=lambda: tokens(17, 8, length, whole=whole),
            **more,
        )

    return job


DECODERS: dict[str, Callable[..., Job]] = {
    "decoder": decoder_job(),
    "decoder, clipped": decoder_job(clip=True),
    "decoder, tied": decoder_job(tied=True),
    "decoder, smoothed": decoder_job(smoothed),
    "decoder, log probabilities": decoder_job(log_probabilities),
    "decoder, two words ahead": decoder_job(two_words_ahead),
    "decoder of four layers with dropout": decoder_job(layers=4, dropout=0.3),
    "decoder, latent": decoder_job(latent=True),
    "decoder, its layers twice": decoder_job(times=2),
    "decoder, peaks": decoder_job(mlp=lambda: Mlp(peak=True)),
    "decoder, a number is read": decoder_job(scaled=True),
    "classes of odd texts": decoder_job(class_of_text, length=7, pooled=True),
    "experts": decoder_job(mlp=lambda: Experts(counts=False)),
    "experts, clipped": decoder_job(mlp=lambda: Experts(counts=False), clip=True),
    "experts, balanced": decoder_job(balanced, mlp=lambda: Experts(counts=False)),
    "experts, counted": decoder_job(mlp=lambda: Experts(counts=True)),
}
OWN.update(DECODERS)
