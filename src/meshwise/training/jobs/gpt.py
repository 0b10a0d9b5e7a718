"""Define a plain decoder-only transformer on bytes of Python's standard library.

RMSNorm, rotary positions, grouped-query attention and SwiGLU, as in Llama 3 (arXiv 2407.21783, table 3 for the sizes).
Shapes: B documents, T tokens, D width, H heads, K key-value heads, E width of a head.

Documents have unequal lengths; the loss is a mean over tokens. A document is a sequence of whole paragraphs (separated
by blank lines) of at most `longest` bytes in total. Of the files, sorted by name, every 16th is held out, so that no
file is in both parts.
"""

from __future__ import annotations

import math
import re
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn, optim
from torch.optim.lr_scheduler import LambdaLR

from meshwise.spec.errors import DataError, UsageError, nearest
from meshwise.training.job.job import Job

ONE_IN = 16  # one file in this many is held out
SHORTEST = 24  # the least number of bytes in a document
SKIPPED = {"site-packages", "test", "tests", "idlelib", "lib2to3", "turtledemo"}  # not library code, or often missing
IGNORED = -100  # the target that cross entropy ignores
START = 256  # the token before every document. The tokens 0 to 255 are bytes


@dataclass(frozen=True)
class Documents:
    """Documents of unequal length, concatenated."""

    data: Tensor
    starts: Tensor
    lengths: Tensor

    def __len__(self) -> int:
        return len(self.starts)

    def batch(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Return inputs and targets, int64 of shape (documents, longest length)."""
        lengths = self.lengths[indices].unsqueeze(1)
        place = torch.arange(int(lengths.max()))
        inside = place < lengths
        text = self.data[(self.starts[indices].unsqueeze(1) + place).clamp(max=len(self.data) - 1)].long()
        targets = torch.where(inside, text, IGNORED)
        before = torch.full((len(indices), 1), START)
        inputs = torch.cat([before, torch.where(inside, text, START)[:, :-1]], dim=1)
        return inputs, targets


def read_files(folder: Path | None = None) -> tuple[list[bytes], list[bytes]]:
    """Read the contents of training files and of held-out files, each sorted by file name."""
    root, pattern, skipped = Path(sysconfig.get_paths()["stdlib"]), "*.py", SKIPPED
    if folder is not None:
        root, pattern, skipped = folder, "*", set()

    def is_text(path: Path) -> bool:
        parts = path.relative_to(root).parts
        hidden = any(part.startswith((".", "__pycache__")) for part in parts)
        return path.is_file() and not hidden and skipped.isdisjoint(parts)

    texts = [path.read_bytes() for path in sorted(root.rglob(pattern)) if is_text(path)]
    if len(texts) < 2:
        raise DataError(
            f"{root} must have at least two text files, one of them for the test set, but it has {len(texts)}. Give "
            "--arg data= a folder with more text files."
        )
    train = [text for place, text in enumerate(texts) if place % ONE_IN]
    return train, texts[::ONE_IN]


def make_documents(files: Sequence[bytes], longest: int, most: int) -> Documents:
    """Draw at most `most` documents of at most `longest` bytes each from all `files`."""
    pieces = [piece for file in files for piece in cut(file, longest)]
    order = torch.randperm(len(pieces), generator=torch.Generator().manual_seed(0))[:most].tolist()
    chosen = [pieces[i] for i in order]
    if not chosen:
        raise DataError(f"every text file is shorter than {SHORTEST} bytes. Use at least one longer text file.")
    lengths = torch.tensor([len(piece) for piece in chosen])
    data = torch.frombuffer(bytearray(b"".join(chosen)), dtype=torch.uint8)
    return Documents(data, lengths.cumsum(0) - lengths, lengths)


def cut(text: bytes, longest: int) -> list[bytes]:
    """Split a file into documents: whole paragraphs that fit into `longest` bytes, or part of a longer paragraph."""
    paragraphs = rb".{%d,%d}\n\n" % (SHORTEST - 2, longest - 2)
    return re.findall(rb"(?s)%b|.{%d,%d}" % (paragraphs, SHORTEST, longest), text)


BYTES = START + 1  # the size of the vocabulary: all bytes, and START


@dataclass(frozen=True)
class GptSize:
    """The dimensions of a model."""

    layers: int
    width: int
    heads: int
    key_value_heads: int
    hidden: int
    vocabulary: int = BYTES
    context: int = 256
    theta: float = 10_000.0


SIZES = {
    "tiny": GptSize(2, 128, 4, 2, 352, context=128),
    "small": GptSize(6, 384, 6, 2, 1024),
    "125m": GptSize(12, 768, 12, 4, 3840, context=1024),
    "1b": GptSize(16, 2048, 32, 8, 8192, context=2048),
    "llama3-8b": GptSize(32, 4096, 32, 8, 14336, 128_256, 8192, 500_000.0),
    "llama3-70b": GptSize(80, 8192, 64, 8, 28672, 128_256, 8192, 500_000.0),
}
TRAINED, HELD_OUT = 8_000, 512  # documents per epoch, documents per evaluation
WARM_UP = 50  # steps


class Attention(nn.Module):
    """Causal self-attention in which H / K query heads share each key-value head."""

    def __init__(self, size: GptSize) -> None:
        super().__init__()
        self.head_width = size.width // size.heads
        self.query = nn.Linear(size.width, size.heads * self.head_width, bias=False)
        self.key = nn.Linear(size.width, size.key_value_heads * self.head_width, bias=False)
        self.value = nn.Linear(size.width, size.key_value_heads * self.head_width, bias=False)
        self.out = nn.Linear(size.heads * self.head_width, size.width, bias=False)

    def forward(self, x_BTD: Tensor, turns: tuple[Tensor, Tensor]) -> Tensor:
        """Apply attention from each position to the position itself and to earlier ones."""
        layers = self.query, self.key, self.value
        q_BHTE, k_BKTE, v_BKTE = (layer(x_BTD).unflatten(-1, (-1, self.head_width)).transpose(1, 2) for layer in layers)
        shared = q_BHTE.shape[1] // k_BKTE.shape[1]
        k_BHTE, v_BHTE = (t.repeat_interleave(shared, dim=1) for t in (rotate(k_BKTE, turns), v_BKTE))
        mixed_BHTE: Tensor = F.scaled_dot_product_attention(rotate(q_BHTE, turns), k_BHTE, v_BHTE, is_causal=True)
        out: Tensor = self.out(mixed_BHTE.transpose(1, 2).flatten(2))
        return out


class FeedForward(nn.Module):
    """The SwiGLU feed-forward layer (arXiv 2002.05202)."""

    def __init__(self, size: GptSize) -> None:
        super().__init__()
        self.gate = nn.Linear(size.width, size.hidden, bias=False)
        self.up = nn.Linear(size.width, size.hidden, bias=False)
        self.down = nn.Linear(size.hidden, size.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Transform each token separately."""
        out: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return out


class Block(nn.Module):
    """A transformer block: attention and feed-forward. Each is applied to the normalized residual stream, and its
    result is added to the stream."""

    def __init__(self, size: GptSize) -> None:
        super().__init__()
        self.attention_norm, self.attention = nn.RMSNorm(size.width, eps=1e-5), Attention(size)
        self.feed_norm, self.feed = nn.RMSNorm(size.width, eps=1e-5), FeedForward(size)

    def forward(self, x: Tensor, turns: tuple[Tensor, Tensor]) -> Tensor:
        """Apply this transformer block to the hidden vectors `x`."""
        x = x + self.attention(self.attention_norm(x), turns)
        out: Tensor = x + self.feed(self.feed_norm(x))
        return out


class Gpt(nn.Module):
    """A model that maps tokens (B, T) to logits (B, T, vocabulary)."""

    def __init__(self, size: GptSize) -> None:
        super().__init__()
        self.size = size
        self.embed = nn.Embedding(size.vocabulary, size.width)
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.layers))
        self.norm = nn.RMSNorm(size.width, eps=1e-5)
        self.head = nn.Linear(size.width, size.vocabulary, bias=False)
        for name, p in self.named_parameters():
            if p.dim() == 2:  # in deeper models, layers that add to the residual stream get smaller initial weights
                depth = math.sqrt(2 * size.layers) if name.endswith(("out.weight", "down.weight")) else 1.0
                nn.init.normal_(p, std=0.02 / depth)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return, for each position, the logits of the next token."""
        x = self.embed(tokens)
        turns = rotary_turns(tokens.shape[1], self.size.width // self.size.heads, self.size.theta, x)
        for block in self.blocks:
            x = block(x, turns)
        logits: Tensor = self.head(self.norm(x))
        return logits


def rotary_turns(length: int, head_width: int, theta: float, like: Tensor) -> tuple[Tensor, Tensor]:
    """Return the cosines and sines, each (T, E / 2), of the angles by which rotary embedding rotates each pair at each
    position (arXiv 2104.09864)."""
    dtype = torch.promote_types(like.dtype, torch.float32)  # bfloat16 cannot distinguish neighboring positions
    speed = theta ** (-torch.arange(0, head_width, 2, device=like.device, dtype=dtype) / head_width)
    angles = torch.outer(torch.arange(length, device=like.device, dtype=dtype), speed)
    return angles.cos().to(like.dtype), angles.sin().to(like.dtype)


def rotate(x: Tensor, turns: tuple[Tensor, Tensor]) -> Tensor:
    """Apply rotary position embedding to queries or keys."""
    cos, sin = turns
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def token_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Return the mean cross entropy of a batch's tokens in nats, and the number of tokens."""
    inputs, targets = batch
    logits = model(inputs).flatten(0, 1)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    loss = F.cross_entropy(logits, targets.flatten(), ignore_index=IGNORED)
    return loss, (targets != IGNORED).sum()


def gpt(size: str = "tiny", *, seed: int = 0, data: Path | None = None) -> Job:
    """Return a job that trains a byte-level model of a named size on text."""
    if size not in SIZES:
        raise UsageError(f"gpt has no size '{size}'.{nearest(size, SIZES)} Use one of {', '.join(SIZES)}.")
    chosen = SIZES[size]
    batch_size, epochs = 32, 2
    steps = epochs * math.ceil(TRAINED / batch_size)

    def rate(step: int) -> float:
        """Return the factor of the learning rate: a linear warm-up, then a cosine decay to 0.1."""
        progress = min(max(step - WARM_UP, 0) / (steps - WARM_UP), 1.0)
        return min((step + 1) / WARM_UP, 0.1 + 0.45 * (1 + math.cos(math.pi * progress)))

    return Job(
        name=f"gpt:{size}",
        model=lambda: Gpt(chosen),
        loss=token_loss,
        optimizer=partial(optim.AdamW, lr=3e-3 if chosen.width <= 384 else 3e-4, betas=(0.9, 0.95), weight_decay=0.1),
        data=lambda: documents(chosen.context, data)[0],
        test=lambda: documents(chosen.context, data)[1],
        metrics=lambda model, batch: {"loss": token_loss(model, batch)},
        scheduler=lambda optimizer: LambdaLR(optimizer, rate),
        clip_norm=1.0,
        batch_size=batch_size,
        epochs=epochs,
        seed=seed,
    )


@lru_cache(maxsize=1)
def documents(context: int, data: Path | None) -> tuple[Documents, Documents]:
    """Return the documents to train on, and the held-out documents for tests."""
    train, held_out = read_files(data)
    return make_documents(train, context, TRAINED), make_documents(held_out, context, HELD_OUT)
