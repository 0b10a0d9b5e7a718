"""Trains plain classifiers in all the ways in which loops are written."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from tests.training.whole.shared import Distribute, mlp, rows, step, usual, weights


def accuracy_beside_loss(distribute: Distribute) -> Any:
    model, optimizer, loader = usual(distribute)
    losses, right, seen = [], 0, 0
    for _ in range(2):
        for x, y in loader:
            out = model(x)
            loss = F.cross_entropy(out, y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            right += (out.argmax(1) == y).sum().item()
            seen += len(x)
    return losses, right / seen, seen, len(loader), weights(model)


def fewer_rows_than_ranks(distribute: Distribute) -> Any:
    left = []
    for size in (1, 2):
        model, optimizer, loader = usual(distribute, data=rows(5), batch_size=size)
        left.append([(step(F.cross_entropy(model(x), y), optimizer), x.size(0)) for x, y in loader])
    return left, weights(model)


def samples_seen_drive_the_rate(distribute: Distribute) -> Any:
    model, optimizer, loader = usual(distribute)
    seen, rates = 0, []
    for _ in range(2):
        for x, y in loader:
            seen += x.shape[0]
            for group in optimizer.param_groups:
                group["lr"] = 0.2 * min(1.0, seen / 30) / (1 + seen / 50)
            rates.append(optimizer.param_groups[0]["lr"])
            step(F.cross_entropy(model(x), y), optimizer)
    return seen, rates, weights(model)


def minibatches_permuted(distribute: Distribute) -> Any:
    model, optimizer, loader = usual(distribute)
    losses = []
    for x, y in loader:
        order = torch.randperm(len(x))
        for start in range(0, len(x), 3):
            chosen = order[start : start + 3]
            losses.append(step(F.cross_entropy(model(x[chosen]), y[chosen]), optimizer))
    return losses, weights(model)


def minibatches_split_chunked_and_sliced(distribute: Distribute) -> Any:
    model, optimizer, loader = usual(distribute)
    for x, y in loader:
        for part, labels in zip(x.chunk(3), y.chunk(3), strict=True):
            step(F.cross_entropy(model(part), labels), optimizer)
        for part, labels in zip(x.split(5), y.split(5), strict=True):
            step(F.cross_entropy(model(part), labels) * len(part) / len(x), optimizer)
        step(F.cross_entropy(model(x[::2]), y[::2]) + model(x[-1:]).square().mean(), optimizer)
    return weights(model)


def accumulation_by_hand(distribute: Distribute) -> Any:
    model, optimizer, loader = usual(distribute, batch_size=4)
    total = 0.0
    for number, (x, y) in enumerate(loader):
        loss = F.cross_entropy(model(x), y) / 3
        loss.backward()
        total += loss.item()
        if (number + 1) % 3 == 0 or number + 1 == len(loader):
            optimizer.step()
            optimizer.zero_grad()
    return total, weights(model)


def clipped_by_norm_and_value(distribute: Distribute) -> Any:
    model, optimizer, loader = usual(distribute)
    norms = []
    for x, y in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y, reduction="sum").backward()
        nn.utils.clip_grad_value_(model.parameters(), 0.5)
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.8)))
        optimizer.step()
        norms.append(sum(p.grad.pow(2).sum().item() for p in model.parameters()) ** 0.5)
    return norms, weights(model)


def batch_norm(distribute: Distribute) -> Any:
    net = nn.Sequential(nn.Linear(6, 8, bias=False), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
    model, optimizer, loader = usual(distribute, net)
    losses = [step(F.cross_entropy(model(x), y), optimizer) for _ in range(2) for x, y in loader]
    model.eval()
    with torch.no_grad():
        return losses, [F.cross_entropy(model(x), y).item() for x, y in loader], weights(model)


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.label, self.energy = mlp(8), nn.Linear(8, 3), nn.Linear(8, 1)

    def encode(self, x: Tensor) -> Tensor:
        return F.normalize(self.body(x), dim=1)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        z = self.encode(x)
        return {"label": self.label(z), "energy": self.energy(z).squeeze(1)}


def parts_and_methods_called(distribute: Distribute) -> Any:
    model, optimizer, loader = usual(distribute, TwoHeads())
    losses = []
    for x, y in loader:
        z = model.encode(x)
        both = model(x + 0.1)
        loss = F.cross_entropy(model.label(z), y) + (model.energy(model.body(x)) ** 2).mean()
        losses.append(step(loss + F.cross_entropy(both["label"], y) + both["energy"].mean() ** 2, optimizer))
    return losses, weights(model)


def validation_keeps_the_best(distribute: Distribute) -> Any:
    model = mlp()
    optimizer = torch.optim.Adam(model.parameters(), 0.05)
    train, held = DataLoader(rows(), batch_size=8, shuffle=True), DataLoader(rows(10), batch_size=4)
    model, optimizer, train, held = distribute(model, optimizer, train, held)
    best, history = float("inf"), []
    for _ in range(3):
        model.train()
        for x, y in train:
            step(F.cross_entropy(model(x), y), optimizer)
        model.eval()
        total, right = 0.0, 0
        with torch.no_grad():
            for x, y in held:
                out = model(x)
                total += F.cross_entropy(out, y).item() * x.size(0)
                right += int(out.argmax(-1).eq(y).sum())
        history.append((total / len(held.dataset), right / len(held.dataset)))
        if history[-1][0] < best:
            best, kept = history[-1][0], copy.deepcopy(model.state_dict())
    model.load_state_dict(kept)
    return best, history, weights(model)


def plateau_lowers_the_rate_and_stops(distribute: Distribute) -> Any:
    model, optimizer, loader = usual(distribute)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.3)
    rates, best, patience = [], float("inf"), 2
    while patience and len(rates) < 6:
        epoch = torch.zeros(())
        for x, y in loader:
            loss = F.cross_entropy(model(x), y) + 0.3 * torch.rand(())
            step(loss, optimizer)
            epoch += loss.detach() * len(x)
        scheduler.step(epoch / len(loader.dataset))
        patience = 2 if epoch < best else patience - 1
        best = min(best, epoch.item())
        rates.append((optimizer.param_groups[0]["lr"], best, patience))
    return rates, weights(model)


def loss_scaler(distribute: Distribute) -> Any:
    model, optimizer, loader = usual(distribute)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2)
    for x, y in loader:
        optimizer.zero_grad()
        scaler.scale(F.cross_entropy(model(x), y)).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
    return scaler.get_scale(), weights(model)


def lbfgs(distribute: Distribute) -> Any:
    model, calls = mlp(), []
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.3, max_iter=4, line_search_fn="strong_wolfe")
    model, optimizer, loader = distribute(model, optimizer, DataLoader(rows(), batch_size=11))
    for x, y in loader:

        def closure(x: Tensor = x, y: Tensor = y) -> Tensor:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            calls.append(loss.item())
            return loss

        optimizer.step(closure)
    return calls, weights(model)


def sharpness_aware(distribute: Distribute) -> Any:
    model, optimizer, loader = usual(distribute)
    for x, y in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
        before = copy.deepcopy(model.state_dict())
        with torch.no_grad():
            for p in model.parameters():
                p.add_(0.05 * p.grad / (norm + 1e-12))
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        model.load_state_dict(before)
        optimizer.step()
    return norm.item(), weights(model)


def two_backwards_of_one_graph(distribute: Distribute) -> Any:
    model, optimizer, loader = usual(distribute)
    angles = []
    for x, y in loader:
        out = model(x)
        first, second = F.cross_entropy(out, y), out.square().mean()
        optimizer.zero_grad()
        first.backward(retain_graph=True)
        before = [p.grad.clone() for p in model.parameters()]
        second.backward()
        angles.append(sum((q * (p.grad - q)).sum() for p, q in zip(model.parameters(), before, strict=True)).item())
        optimizer.step()
    return angles, weights(model)


def two_loaders_zipped(distribute: Distribute) -> Any:
    model, optimizer, known = usual(distribute, data=rows(12), batch_size=4)
    unknown = distribute(DataLoader(rows(21).tensors[0], batch_size=7, shuffle=True))
    for (x, y), u in zip(known, unknown, strict=True):
        sure = model(u).softmax(1).max(1)
        pseudo = (F.cross_entropy(model(u), sure.indices, reduction="none") * (sure.values > 0.4)).mean()
        out = model(torch.cat([x, u[:4]]))
        step(F.cross_entropy(out[: len(x)], y) + pseudo + out[len(x) :].pow(2).mean(), optimizer)
    return weights(model)
