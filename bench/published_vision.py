"""ResNet-50 and BERT of published runs."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


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
