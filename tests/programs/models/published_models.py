"""Builds models of published runs, of any sizes, as those programs write them; nobody reads their random weights."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from meshwise.parallel.splits.crossing import gather
from meshwise.training.jobs.gpt import rotary_turns, rotate


@dataclass(frozen=True)
class Size:
    """positions: of a learned table, 0 for none. stream: the dtype of what flows between the blocks; None: that of the
    weights. loss: of LOSSES. flash: whether attention is one kernel. selective: whether blocks recompute all but
    attention and every second product, as torchtitan does. gathers: whether logits that a tensor axis has split are
    gathered. megatron: queries, keys and values lie beside each other by head, and scale, mask and softmax of scores
    are one kernel; selective then recomputes the core of attention. measured: whether a metric over all logits is
    computed beside the loss."""

    layers: int
    width: int
    heads: int
    key_value_heads: int
    hidden: int
    vocabulary: int
    length: int
    positions: int = 0
    stream: torch.dtype | None = None
    loss: str = "wide"
    flash: bool = True
    selective: bool = False
    gathers: bool = False
    megatron: bool = False
    measured: bool = False


class Norm(nn.Module):
    """A norm in the dtype of the stream, as programs under FSDP's mixed precision compute it."""

    def __init__(self, width: int, rms: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = None if rms else nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):
            weight = self.weight.to(x.dtype)
            if self.bias is None:
                return F.rms_norm(x, weight.shape, weight, 1e-5)
            return F.layer_norm(x, weight.shape, weight, self.bias.to(x.dtype))


class GptAttention(nn.Module):
    """Queries, keys and values of one product, with biases. Without flash the scores lie in memory, and are dropped."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.heads, self.flash, self.megatron, self.again = size.heads, size.flash, size.megatron, size.selective
        self.qkv = nn.Linear(size.width, 3 * size.width)
        self.out = nn.Linear(size.width, size.width)

    def forward(self, x: Tensor) -> Tensor:
        if self.megatron:
            q, k, v = self.qkv(x).unflatten(-1, (self.heads, -1)).transpose(1, 2).chunk(3, dim=-1)
        else:
            q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, dim=-1))
        if self.flash:
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        elif self.megatron:
            mixed = checkpoint(scored, q, k, v, use_reentrant=False) if self.again else scored(q, k, v)
        else:
            scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
            hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=x.device).triu(1)
            with torch.autocast(x.device.type, enabled=False):
                mixed = F.dropout(F.softmax(scores.masked_fill(hidden, -1e4), -1), 0.1) @ v
        out: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return out


def scored(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention whose scores lie in memory: two products, and one kernel for scale, mask and softmax, which takes what
    a softmax alone does. A factor stands for the dropout, which moves as many bytes but for its mask: that of a split
    layer is drawn for the whole here."""
    with torch.autocast(q.device.type, enabled=False):
        return F.softmax(q @ k.transpose(-1, -2), -1) * 0.9 @ v


class GptBlock(nn.Module):
    """A block of it."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.norm_1, self.attention = Norm(size.width, rms=False), GptAttention(size)
        self.norm_2 = Norm(size.width, rms=False)
        self.up, self.down = nn.Linear(size.width, size.hidden), nn.Linear(size.hidden, size.width)
        self.drop = 0.0 if size.flash else 0.1

    def forward(self, x: Tensor) -> Tensor:
        x = x + F.dropout(self.attention(self.norm_1(x)), self.drop)
        out: Tensor = x + F.dropout(self.down(F.gelu(self.up(self.norm_2(x)))), self.drop)
        return out


class Gpt(nn.Module):
    """GPT with learned positions and a tied head: MPT without ALiBi, Megatron's GPT. Tokens to logits."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.embed, self.stream, self.loss = nn.Embedding(size.vocabulary, size.width), size.stream, size.loss
        self.measured = size.measured
        self.places = nn.Embedding(size.positions, size.width)
        self.blocks = nn.ModuleList(GptBlock(size) for _ in range(size.layers))
        self.norm = Norm(size.width, rms=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embed(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        x = x if self.stream is None else x.to(self.stream)
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.norm(x), self.embed.weight)
        if self.measured:
            loss_of(logits.detach(), targets, "narrow")
        return loss_of(logits, targets, self.loss)


def every_second_product() -> Callable[..., CheckpointPolicy]:
    """What torchtitan keeps under its selective recompute of operators (parallelize_llama.py, end of 2024)."""
    seen: Counter[bool] = Counter()

    def policy(context: Any, operator: Any, *arguments: Any, **keywords: Any) -> CheckpointPolicy:
        name = operator.name().split(".")[0]
        if name == "aten::mm":
            seen[context.is_recompute] += 1
        kept = seen[context.is_recompute] % 2 == 1 if name == "aten::mm" else name in KEPT
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    return policy


KEPT = {
    "aten::_scaled_dot_product_flash_attention",
    "aten::_scaled_dot_product_efficient_attention",
    "_c10d_functional::reduce_scatter_tensor",
}


class LlamaBlock(nn.Module):
    """Grouped queries (keys and values repeated in memory, as torchtitan does), rotary positions, SwiGLU."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.head = size.width // size.heads
        self.norm_1, self.norm_2 = Norm(size.width, rms=True), Norm(size.width, rms=True)
        kv = size.key_value_heads * self.head
        self.query, self.key, self.value = (nn.Linear(size.width, n, bias=False) for n in (size.width, kv, kv))
        self.out = nn.Linear(size.width, size.width, bias=False)
        self.gate, self.up = (nn.Linear(size.width, size.hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(size.hidden, size.width, bias=False)
        self.selective = size.selective

    def forward(self, x: Tensor, turns: tuple[Tensor, Tensor]) -> Tensor:
        if not self.selective:
            return self.inner(x, turns)
        chosen = partial(create_selective_checkpoint_contexts, every_second_product())
        out: Tensor = checkpoint(self.inner, x, turns, use_reentrant=False, context_fn=chosen)
        return out

    def inner(self, x: Tensor, turns: tuple[Tensor, Tensor]) -> Tensor:
        y = self.norm_1(x)
        q, k, v = (f(y).unflatten(-1, (-1, self.head)).transpose(1, 2) for f in (self.query, self.key, self.value))
        q, k = rotate(q, turns), rotate(k, turns)
        k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], dim=1) for t in (k, v))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        y = self.norm_2(x)
        out: Tensor = x + self.down(F.silu(self.gate(y)) * self.up(y))
        return out


class Llama(nn.Module):
    """Tokens to logits."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.size = size
        self.embed = nn.Embedding(size.vocabulary, size.width)
        self.blocks = nn.ModuleList(LlamaBlock(size) for _ in range(size.layers))
        self.norm = Norm(size.width, rms=True)
        self.head = nn.Linear(size.width, size.vocabulary, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embed(tokens)
        x = x if self.size.stream is None else x.to(self.size.stream)
        turns = rotary_turns(tokens.shape[1], self.size.width // self.size.heads, 5e5, x)
        for block in self.blocks:
            x = block(x, turns)
        logits = self.head(self.norm(x))
        return loss_of(gather(logits) if self.size.gathers else logits, targets, self.size.loss)


class Random:
    """A data set of `samples` rows, all zeros: what is trained on does not matter here."""

    def __init__(self, samples: int, *rows: tuple[int, ...] | tuple[tuple[int, ...], torch.dtype]) -> None:
        self.samples, self.rows = samples, rows

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        return tuple(part[0] for part in self.batch([index]))

    def batch(self, indices: list[int]) -> tuple[Tensor, ...]:
        """These rows, as one batch."""
        return tuple(torch.zeros(1, dtype=dtype).expand(len(indices), *shape).clone() for shape, dtype in self.rows)


@torch.library.custom_op("published::cross_entropy", mutates_args=())
def one_kernel(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Losses of rows and their log sum of exponentials, from one kernel that reads the logits once."""
    raise NotImplementedError  # never computed: rehearsals ask for its shapes


@torch.library.custom_op("published::cross_entropy_backward", mutates_args=())
def one_kernel_backward(gradient: Tensor, logits: Tensor, total: Tensor, targets: Tensor) -> Tensor:
    """Reads the logits, writes their gradient."""
    raise NotImplementedError


@one_kernel.register_fake
def _(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    return logits.new_empty(len(logits), dtype=torch.float32), logits.new_empty(len(logits), dtype=torch.float32)


@one_kernel_backward.register_fake
def _(gradient: Tensor, logits: Tensor, total: Tensor, targets: Tensor) -> Tensor:
    return torch.empty_like(logits)


class OneKernel(torch.autograd.Function):
    """flash-attn's cross entropy: two passes over the logits in all."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor) -> Tensor:
        losses, total = one_kernel(logits, targets)
        ctx.save_for_backward(logits, total, targets)
        return losses

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return one_kernel_backward(gradient, *ctx.saved_tensors), None


LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "wide": lambda logits, targets: F.cross_entropy(logits.float(), targets),
    "narrow": F.cross_entropy,
    "one kernel": lambda logits, targets: OneKernel.apply(logits, targets).mean(),
}
"""Cross entropies of programs: in float32, in the dtype of the logits, and from one kernel."""


def loss_of(logits: Tensor, targets: Tensor, kind: str) -> Tensor:
    """Mean cross entropy of the tokens. kind: of LOSSES."""
    with torch.autocast(logits.device.type, enabled=False):
        return LOSSES[kind](logits.flatten(0, 1), targets.flatten())


def own_loss(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    """That which the model computes itself, in the dtype that it has there."""
    loss: Tensor = model(*batch)
    return loss


# ---- ResNet-50 and BERT ----------------------------------------------------------------------------------------------


class Bottleneck(nn.Module):
    """v1.5: the stride is in the 3 x 3 convolution."""

    def __init__(self, channels: int, inner: int, stride: int) -> None:
        super().__init__()
        sizes = (channels, inner, 1, 1), (inner, inner, 3, stride), (inner, 4 * inner, 1, 1)
        self.layers = nn.ModuleList(nn.Conv2d(a, b, k, s, k // 2, bias=False) for a, b, k, s in sizes)
        self.norms = nn.ModuleList(nn.BatchNorm2d(b) for _, b, _, _ in sizes)
        same = stride == 1 and channels == 4 * inner
        self.shortcut = nn.Identity() if same else nn.Conv2d(channels, 4 * inner, 1, stride, bias=False)
        self.norm = nn.Identity() if same else nn.BatchNorm2d(4 * inner)

    def forward(self, x: Tensor) -> Tensor:
        beside = self.norm(self.shortcut(x))
        for place, (layer, norm) in enumerate(zip(self.layers, self.norms, strict=True)):
            x = norm(layer(x))
            x = F.relu(x, inplace=True) if place < 2 else x
        return F.relu(x + beside, inplace=True)


class ResNet50(nn.Module):
    """Images and labels to the loss. last: whether channels lie last in memory, as in the examples' AMP."""

    def __init__(self, layers: int = 0, last: bool = False) -> None:
        super().__init__()
        self.format = torch.channels_last if last else torch.contiguous_format
        self.stem, self.norm = nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64)
        blocks, channels = [], 64
        for inner, count in ((64, 3), (128, 4), (256, 6), (512, 3)):
            for place in range(count):
                blocks.append(Bottleneck(channels, inner, 2 if place == 0 and inner > 64 else 1))
                channels = 4 * inner
        self.blocks, self.head = nn.ModuleList(blocks), nn.Linear(channels, 1000)
        self.to(memory_format=self.format)  # type: ignore[call-overload]

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        images = images.contiguous(memory_format=self.format)
        x = F.max_pool2d(F.relu(self.norm(self.stem(images)), inplace=True), 3, 2, 1)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x.mean((2, 3))), labels)


class BertLayer(nn.Module):
    """Scores of attention in memory, with dropout, as NVIDIA's examples compute them."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for f in (self.query, self.key, self.value))
        scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5 + mask
        mixed = F.dropout(F.softmax(scores, -1), 0.1) @ v
        x = self.norm_1(x + F.dropout(self.out(mixed.transpose(1, 2).flatten(2)), 0.1))
        return self.norm_2(x + F.dropout(self.down(F.gelu(self.up(x))), 0.1))


class Bert(nn.Module):
    """Question answering: tokens and spans to the loss."""

    def __init__(self, layers: int, width: int, heads: int, vocabulary: int = 30528) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(vocabulary, width), nn.Embedding(512, width)
        self.kinds, self.norm = nn.Embedding(2, width), nn.LayerNorm(width)
        self.blocks = nn.ModuleList(BertLayer(width, heads) for _ in range(layers))
        self.head = nn.Linear(width, 2)

    def forward(self, tokens: Tensor, spans: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = F.dropout(self.norm(self.words(tokens) + self.places(places) + self.kinds(torch.zeros_like(tokens))), 0.1)
        mask = ((tokens < 0).to(x.dtype) * -1e4)[:, None, None]
        for block in self.blocks:
            x = block(x, mask)
        starts, ends = self.head(x).unbind(-1)
        return (F.cross_entropy(starts.float(), spans[:, 0]) + F.cross_entropy(ends.float(), spans[:, 1])) / 2
