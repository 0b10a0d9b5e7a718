"""Models that nobody wrote for us, as jobs: convolutions with batch norm, an LSTM, two towers over one embedding, and
four of the `transformers` package, made from configurations with random weights and their own dropout.

They are small, so that a check in float64 takes a second, and each stands as its author wrote it: what a plan asks of
the code is the job around it, which a plain loop would need as well.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn, optim
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, OneCycleLR, StepLR

from meshwise.training.job.job import Job

WORDS, LENGTH, IGNORED = 61, 10, -100
SAMPLES, TESTED, BATCH = 29, 17, 8

Batch = dict[str, Tensor]


class BasicBlock(nn.Module):
    """Two convolutions with batch norm beside a shortcut (He and others, 2016)."""

    def __init__(self, channels_in: int, channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = None
        if stride != 1 or channels_in != channels:
            self.downsample = nn.Sequential(
                nn.Conv2d(channels_in, channels, 1, stride, bias=False), nn.BatchNorm2d(channels)
            )

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x if self.downsample is None else self.downsample(x)
        x = self.relu(self.bn1(self.conv1(x)))
        return self.relu(self.bn2(self.conv2(x)) + shortcut)


class ResNet(nn.Module):
    """Two stages of two blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16)
        self.layer1 = nn.Sequential(BasicBlock(16, 16, 1), BasicBlock(16, 16, 1))
        self.layer2 = nn.Sequential(BasicBlock(16, 24, 2), BasicBlock(24, 24, 1))
        self.fc = nn.Linear(24, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn1(self.conv1(x)))
        return self.fc(self.layer2(self.layer1(x)).mean((2, 3)))


class UNet(nn.Module):
    """Down and up again, with what each level had beside what comes from below (Ronneberger and others, 2015)."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList([self.level(3, 8), self.level(8, 12)])
        self.bottom = self.level(12, 20)
        self.up = nn.ModuleList([nn.ConvTranspose2d(20, 12, 2, 2), nn.ConvTranspose2d(12, 8, 2, 2)])
        self.join = nn.ModuleList([self.level(24, 12), self.level(16, 8)])
        self.each_pixel = nn.Conv2d(8, 4, 1)

    @staticmethod
    def level(channels_in: int, channels: int) -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(channels_in, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels),
            nn.ReLU(inplace=True),
            nn.Conv2d(channels, channels, 3, padding=1),
            nn.GroupNorm(4, channels),
            nn.SiLU(),
        )

    def forward(self, x: Tensor) -> Tensor:
        beside = []
        for level in self.down:
            beside.append(level(x))
            x = F.max_pool2d(beside[-1], 2)
        x = self.bottom(x)
        for up, join in zip(self.up, self.join, strict=True):
            x = join(torch.cat([beside.pop(), up(x)], 1))
        return self.each_pixel(x)


class Tagger(nn.Module):
    """Words to tags: a bidirectional LSTM of two layers, with dropout between them."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.drop = nn.Embedding(WORDS, 12, padding_idx=0), nn.Dropout(0.2)
        self.lstm = nn.LSTM(12, 16, num_layers=2, dropout=0.3, bidirectional=True, batch_first=True)
        self.tag = nn.Linear(32, 7)

    def forward(self, words: Tensor) -> Tensor:
        return self.tag(self.drop(self.lstm(self.drop(self.embed(words)))[0]))


class Tower(nn.Module):
    """Words to a vector."""

    def __init__(self, embed: nn.Embedding) -> None:
        super().__init__()
        self.embed = embed
        self.layers = nn.ModuleList(nn.Linear(66, 66) for _ in range(2))

    def forward(self, words: Tensor) -> Tensor:
        x = self.embed(words).mean(1)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return F.normalize(x, dim=-1)


class TwoTowers(nn.Module):
    """Whether a user's words and a thing's words belong together; both towers look words up in one embedding."""

    def __init__(self) -> None:
        super().__init__()
        embed = nn.Embedding(WORDS, 66)
        self.users, self.things = Tower(embed), Tower(embed)
        self.scale = nn.Parameter(torch.full((1,), 3.0))

    def forward(self, user: Tensor, thing: Tensor) -> Tensor:
        return self.scale * (self.users(user) * self.things(thing)).sum(-1)


def llama() -> nn.Module:
    import transformers

    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=WORDS,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
        )
    )


def gpt2() -> nn.Module:
    import transformers

    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=WORDS, n_embd=32, n_layer=2, n_head=4, n_positions=16, bos_token_id=1, eos_token_id=2
        )
    )


def bert() -> nn.Module:
    import transformers

    return transformers.BertForMaskedLM(
        transformers.BertConfig(
            vocab_size=WORDS,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=16,
        )
    )


def vit() -> nn.Module:
    import transformers

    return transformers.ViTForImageClassification(
        transformers.ViTConfig(
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            image_size=8,
            patch_size=4,
            num_labels=5,
        )
    )


def images(count: int, seed: int) -> Batch:
    draw = torch.Generator().manual_seed(seed)
    return {
        "pixel_values": torch.randn(count, 3, 8, 8, generator=draw),
        "labels": torch.randint(5, (count,), generator=draw),
    }


def outlined(count: int, seed: int) -> Batch:
    """Images with a class for each pixel, or none."""
    draw = torch.Generator().manual_seed(seed)
    classes = torch.randint(4, (count, 8, 8), generator=draw)
    unknown = torch.rand(count, 8, 8, generator=draw) < torch.linspace(0, 0.6, count)[:, None, None]
    return {
        "pixel_values": torch.randn(count, 3, 8, 8, generator=draw),
        "labels": classes.masked_fill(unknown, IGNORED),
    }


def sentences(count: int, seed: int) -> Batch:
    """Sentences of unequal lengths, padded; what is padding has no label."""
    draw = torch.Generator().manual_seed(seed)
    words = torch.randint(1, WORDS, (count, LENGTH), generator=draw)
    lengths = torch.randint(3, LENGTH + 1, (count, 1), generator=draw)
    there = torch.arange(LENGTH) < lengths
    return {
        "input_ids": words * there,
        "attention_mask": there.long(),
        "labels": torch.where(there, words, torch.tensor(IGNORED)),
    }


def masked(count: int, seed: int) -> Batch:
    """Every third word is hidden, and has a label."""
    batch = sentences(count, seed)
    hidden = (torch.arange(LENGTH) % 3 == seed % 2) & (batch["attention_mask"] == 1)
    return {
        **batch,
        "input_ids": batch["input_ids"].masked_fill(hidden, 1),
        "labels": batch["labels"].masked_fill(~hidden, IGNORED),
    }


def tagged(count: int, seed: int) -> Batch:
    batch = sentences(count, seed)
    return {"words": batch["input_ids"], "tags": torch.where(batch["labels"] >= 0, batch["labels"] % 7, IGNORED)}


def pairs(count: int, seed: int) -> Batch:
    draw = torch.Generator().manual_seed(seed)
    user, thing = (torch.randint(WORDS, (count, size), generator=draw) for size in (6, 4))
    return {"user": user, "thing": thing, "together": torch.randint(2, (count,), generator=draw).float()}


def next_word(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    """What a causal model of `transformers` says its loss is: a mean over the labels after the first."""
    return model(**batch).loss, (batch["labels"][:, 1:] != IGNORED).sum()


def hidden_word(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    return model(**batch).loss, (batch["labels"] != IGNORED).sum()


def of_class(model: nn.Module, batch: Batch) -> Tensor:
    return model(**batch).loss


def of_image(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch["pixel_values"]), batch["labels"])


def of_pixels(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    loss = F.cross_entropy(model(batch["pixel_values"]), batch["labels"], ignore_index=IGNORED)
    return loss, (batch["labels"] != IGNORED).sum()


def of_tags(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    loss = F.cross_entropy(model(batch["words"]).flatten(0, 1), batch["tags"].flatten(), ignore_index=IGNORED)
    return loss, (batch["tags"] != IGNORED).sum()


def of_pairs(model: nn.Module, batch: Batch) -> Tensor:
    return F.binary_cross_entropy_with_logits(model(batch["user"], batch["thing"]), batch["together"])


def right_words(model: nn.Module, batch: Batch) -> dict[str, Any]:
    output, labels = model(**batch), batch["labels"][:, 1:]
    counted = (labels != IGNORED).sum()
    right = (output.logits[:, :-1].argmax(-1) == labels).sum()
    return {"loss": (output.loss, counted), "accuracy": (right / counted, counted)}


def right_tags(model: nn.Module, batch: Batch) -> dict[str, Any]:
    counted = (batch["tags"] != IGNORED).sum()
    right = (model(batch["words"]).argmax(-1) == batch["tags"]).sum()
    return {"accuracy": (right / counted, counted)}


def right_images(model: nn.Module, batch: Batch) -> dict[str, Any]:
    return {
        "loss": of_image(model, batch),
        "accuracy": (model(batch["pixel_values"]).argmax(-1) == batch["labels"]).float().mean(),
    }


def decayed(parameters: Iterable[nn.Parameter]) -> optim.Optimizer:
    """AdamW that decays matrices alone."""
    ps = list(parameters)
    groups = [
        {"params": [p for p in ps if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in ps if p.ndim <= 1], "weight_decay": 0.0},
    ]
    return optim.AdamW(groups, lr=3e-3, betas=(0.9, 0.95))


def adam(parameters: Iterable[nn.Parameter]) -> optim.Optimizer:
    return optim.AdamW(parameters, lr=3e-3)


def momentum(parameters: Iterable[nn.Parameter]) -> optim.Optimizer:
    return optim.SGD(parameters, lr=0.05, momentum=0.9, nesterov=True, weight_decay=1e-3)


def cosine(optimizer: optim.Optimizer) -> LRScheduler:
    return LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 2) * (1 + math.cos(math.pi * step / 10)) / 2)


def one_cycle(optimizer: optim.Optimizer) -> LRScheduler:
    return OneCycleLR(optimizer, 0.1, total_steps=12)


def halved(optimizer: optim.Optimizer) -> LRScheduler:
    return StepLR(optimizer, 2, gamma=0.5)


def of(name: str, seed: int, model: Any, data: Callable[[int, int], Batch], loss: Any, **more: Any) -> Job:
    train, test = data(SAMPLES, 7), data(TESTED, 8)
    settings: dict[str, Any] = {"optimizer": adam, "batch_size": BATCH, "test": lambda: test, "seed": seed}
    return Job(name, model, loss, data=lambda: train, **{**settings, **more})


def the_job(name: str, seed: int = 0) -> Job:
    """One of `MODELS` as a job."""
    return MODELS[name](name, seed)


MODELS: dict[str, Callable[[str, int], Job]] = {
    "resnet": lambda n, s: of(
        n, s, ResNet, images, of_image, optimizer=momentum, scheduler=one_cycle, metrics=right_images
    ),
    "unet": lambda n, s: of(n, s, UNet, outlined, of_pixels, optimizer=momentum, clip_norm=1.0, scheduler=one_cycle),
    "lstm-tagger": lambda n, s: of(n, s, Tagger, tagged, of_tags, clip_norm=0.3, metrics=right_tags),
    "two-tower": lambda n, s: of(n, s, TwoTowers, pairs, of_pairs, scheduler=halved),
    "llama": lambda n, s: of(
        n, s, llama, sentences, next_word, optimizer=decayed, scheduler=cosine, clip_norm=0.5, metrics=right_words
    ),
    "gpt2": lambda n, s: of(n, s, gpt2, sentences, next_word, optimizer=decayed, clip_norm=0.5, metrics=right_words),
    "bert": lambda n, s: of(n, s, bert, masked, hidden_word, clip_norm=1.0, scheduler=halved),
    "vit": lambda n, s: of(n, s, vit, images, of_class, optimizer=momentum, scheduler=one_cycle),
}
