"""Reads batches of all kinds, and keeps what a user keeps of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, RandomSampler, WeightedRandomSampler

from tests.training.whole.shared import Distribute, binary, images, mlp, rows, step, usual, weights


def samplers_of_the_users_own(distribute: Distribute) -> Any:
    model, data = mlp(), rows()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    counts = torch.bincount(data.tensors[1], minlength=3)
    sampler = WeightedRandomSampler((1 / counts)[data.tensors[1]].tolist(), 18)
    batches = [b[: 3 + n % 4] for n, b in enumerate(BatchSampler(RandomSampler(data), 6, drop_last=False))]
    even, cut = DataLoader(data, batch_size=5, sampler=sampler), DataLoader(data, batch_sampler=batches)
    model, optimizer, even, cut = distribute(model, optimizer, even, cut)
    seen, sizes = torch.zeros(3, dtype=torch.long), []
    for loader in (even, cut):
        for x, y in loader:
            step(F.cross_entropy(model(x), y), optimizer)
            seen += torch.bincount(y, minlength=3)
            sizes.append(len(x))
    return seen.tolist(), sizes, weights(model)


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        yield from rows(19)


def streamed_samples(distribute: Distribute) -> Any:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model, optimizer, loader = distribute(model, optimizer, DataLoader(Stream(), batch_size=5))
    return [(len(y), step(F.cross_entropy(model(x), y), optimizer)) for x, y in loader], weights(model)


class Pair(NamedTuple):
    low: Tensor
    high: Tensor


class Named(Dataset[Any]):
    def __len__(self) -> int:
        return 21

    def __getitem__(self, number: int) -> Any:
        x, y = rows()[number]
        return {"parts": Pair(x[:3], x[3:]), "label": y, "name": f"row {number}", "weight": 0.5 + number / 21}


def batch_is_a_dict_with_a_named_tuple(distribute: Distribute) -> Any:
    model, optimizer, loader = usual(distribute, data=Named())
    names = []
    for batch in loader:
        out = model(torch.cat([batch["parts"].low, batch["parts"].high], dim=1))
        loss = F.cross_entropy(out, batch["label"], reduction="none")
        step((loss * batch["weight"]).sum() / batch["weight"].sum(), optimizer)
        names += [int(name.split()[1]) for name in batch["name"]]
    return names, weights(model)


@dataclass
class Graded:
    x: Tensor
    y: Tensor
    hardness: float


def graded(samples: list[Any]) -> Graded:
    """A batch in the order of its norms, as a class of the user's own."""
    x, y = torch.stack([x for x, _ in samples]), torch.stack([y for _, y in samples])
    order = x.norm(dim=1).argsort()
    return Graded(x[order] / x.std(), y[order], x.norm(dim=1).mean().item())


def batch_is_a_dataclass(distribute: Distribute) -> Any:
    model, optimizer, loader = usual(distribute, collate=graded)
    losses = [step(F.cross_entropy(model(b.x), b.y) / b.hardness, optimizer) for b in loader]
    return losses, weights(model)


class Finder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.boxes, self.names = nn.Conv2d(1, 4, 3, 2, 1), nn.Linear(64, 8), nn.Linear(64, 6)

    def forward(self, pictures: list[Tensor], targets: list[dict[str, Tensor]] | None = None) -> Any:
        z = self.body(torch.stack(pictures)).relu().flatten(1)
        found = [self.boxes(z).view(-1, 2, 4).sigmoid(), self.names(z).view(-1, 2, 3)]
        if targets is None:
            return [{"boxes": boxes, "scores": names.softmax(-1)} for boxes, names in zip(*found, strict=True)]
        place = name = 0.0
        for boxes, names, target in zip(*found, targets, strict=True):
            near = torch.cdist(target["boxes"], boxes.detach()).argmin(1)
            place = place + F.smooth_l1_loss(boxes[near], target["boxes"], reduction="sum")
            name = name + F.cross_entropy(names[near], target["labels"])
        return {"place": place / sum(len(t["boxes"]) for t in targets), "name": name / len(targets)}


def objects() -> list[Any]:
    generator = torch.Generator().manual_seed(7)
    boxes = [torch.rand(1 + number % 3, 4, generator=generator) for number in range(13)]
    return [(p, {"boxes": b, "labels": torch.arange(len(b))}) for (p, _), b in zip(images(), boxes, strict=True)]


def detection(distribute: Distribute) -> Any:
    model, optimizer, loader = usual(distribute, Finder(), objects(), 5, lambda batch: tuple(zip(*batch, strict=True)))
    losses, scores = [], []
    for pictures, targets in loader:
        losses.append(step(sum(model(list(pictures), list(targets)).values()), optimizer))
        with torch.no_grad():
            found = model(list(pictures))
        scores += [one["scores"][one["boxes"][:, 0] < 0.9].sum().item() for one in found]
    return losses, scores, weights(model)


def printed_lines(distribute: Distribute) -> Any:
    model, optimizer, loader = usual(distribute)
    lines = []
    for number, (x, y) in enumerate(loader):
        out = model(x)
        loss = F.cross_entropy(out, y)
        step(loss, optimizer)
        lines.append(f"{number} {loss:.6f} {loss.item():.4f} {list(x.shape)} {x.dtype} {y[0]} {tuple(out.size())}")
        lines.append(f"{y} {y.tolist()} {x.numel()} {x.ndim} {out.requires_grad} {y.max()!s} {x[0, 0]:+.3f}")
    return lines, weights(model)


def predictions_of_an_epoch(distribute: Distribute) -> Any:
    model, optimizer, loader = usual(distribute)
    kept, truth, losses, table = [], [], [], torch.zeros(9, dtype=torch.long)
    for x, y in loader:
        out = model(x)
        losses.append(F.cross_entropy(out, y, reduction="none").detach())
        step(F.cross_entropy(out, y), optimizer)
        kept.append(out.detach().cpu())
        truth.append(y.numpy())
        table += torch.bincount(3 * y + out.argmax(1), minlength=9)
    scores, labels = torch.cat(kept).softmax(1).numpy(), np.concatenate(truth)
    order = np.argsort(-scores[:, 1], kind="stable")
    right = (labels[order] == 1).astype(float)
    precision = float((np.cumsum(right) / np.arange(1, len(right) + 1) * right).sum() / right.sum())
    right = float(np.mean(scores.argmax(1) == labels))
    return precision, right, table.view(3, 3).tolist(), torch.cat(losses).tolist(), weights(model)


def labels_by_threshold(distribute: Distribute) -> Any:
    model, optimizer, loader = usual(distribute, mlp(3), binary(labels=3))
    hit, told, meant = torch.zeros(3), torch.zeros(3), 0
    for _ in range(2):
        for x, y in loader:
            out = model(x)
            step(F.binary_cross_entropy_with_logits(out, y), optimizer)
            said = (out.sigmoid() > 0.4).to(y.dtype)
            hit += (said * y).sum(0)
            told += said.sum(0)
            meant = meant + y.sum(dim=0)
    f1 = 2 * hit / (told + meant).clamp(min=1)
    return f1.tolist(), f1.mean().item(), hit.tolist(), weights(model)


def sums_kept_for_later(distribute: Distribute) -> Any:
    """Reads sums over rows after what they were made with has changed, cast to whole numbers and written into."""
    model, optimizer, loader = usual(distribute)
    left, seen = [], torch.tensor(2.0)
    for x, y in loader:
        mean, sums = x.sum() / seen, x.sum(0)
        seen += len(x)
        sums[0] = 5.0
        left.append([mean.item(), (x.sum().to(torch.int64) + 1).item(), ((y == 1).sum().to(torch.bool) + 0).item()])
        left.append((sums.tolist(), step(F.cross_entropy(model(x), y), optimizer)))
    return left, weights(model)
