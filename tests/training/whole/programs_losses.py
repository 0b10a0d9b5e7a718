"""Trains with losses that are more than a mean of each row's own."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from tests.training.whole.shared import Distribute, binary, fit, images, mlp, rows, step, tokens, usual, weights


def class_weights_and_smoothed_labels(distribute: Distribute) -> Any:
    criterion = nn.CrossEntropyLoss(torch.tensor([0.2, 1.0, 3.0]), label_smoothing=0.2)
    return fit(distribute, lambda model, x, y: criterion(model(x), y))


def mean_of_tokens_that_count(distribute: Distribute) -> Any:
    net = nn.Sequential(nn.Embedding(11, 8), nn.Tanh(), nn.Linear(8, 11))
    words = tokens().tensors[0]
    targets = words.roll(-1, 1).masked_fill(torch.arange(6) >= 1 + torch.arange(13)[:, None] % 6, -100)

    def loss(model: nn.Module, w: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(model(w).flatten(0, 1), target.flatten(), ignore_index=-100)

    return fit(distribute, loss, net, TensorDataset(words, targets))


def weight_of_positives(distribute: Distribute) -> Any:
    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        weight = (y.numel() - y.sum()) / y.sum().clamp(min=1)
        return F.binary_cross_entropy_with_logits(model(x), y, pos_weight=weight)

    return fit(distribute, loss, mlp(1), binary())


def mixup(distribute: Distribute) -> Any:
    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        share = torch.distributions.Beta(0.4, 0.4).sample().item()
        other = torch.randperm(x.size(0))
        out = model(share * x + (1 - share) * x[other])
        return share * F.cross_entropy(out, y) + (1 - share) * F.cross_entropy(out, y[other])

    return fit(distribute, loss)


def cutmix(distribute: Distribute) -> Any:
    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        other, (top, left) = torch.randperm(len(x)), torch.randint(0, 5, (2,)).tolist()
        x = x.clone()
        x[:, :, top : top + 4, left : left + 3] = x[other, :, top : top + 4, left : left + 3]
        out, share = model(x), 1 - 12 / 64
        return share * F.cross_entropy(out, y) + (1 - share) * F.cross_entropy(out, y[other])

    net = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.MaxPool2d(4), nn.Flatten(), nn.Linear(16, 2))
    return fit(distribute, loss, net, images())


def running_scale(distribute: Distribute) -> Any:
    model, optimizer, loader = usual(distribute)
    mean, smooth, scaled = None, torch.ones(()), []
    for x, y in loader:
        loss = F.cross_entropy(model(x), y)
        mean = loss.item() if mean is None else 0.9 * mean + 0.1 * loss.item()
        smooth = 0.9 * smooth + 0.1 * loss.detach()
        scaled.append(step(loss / mean + (loss / smooth) ** 2, optimizer))
    return mean, smooth.item(), scaled, weights(model)


def dice(distribute: Distribute) -> Any:
    net = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.Tanh(), nn.Conv2d(4, 1, 1))

    def loss(model: nn.Module, x: Tensor, _: Tensor) -> Tensor:
        said, mask = model(x).sigmoid(), (x > 0.5).double()
        return 1 - (2 * (said * mask).sum() + 1) / (said.sum() + mask.sum() + 1)

    return fit(distribute, loss, net, images())


def focal(distribute: Distribute) -> Any:
    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        logs = F.log_softmax(model(x), dim=-1)
        log = logs.gather(1, y.unsqueeze(1)).squeeze(1)
        return -((1 - log.exp()) ** 2 * log).mean() + 0.01 * F.nll_loss(logs, y, reduction="sum")

    return fit(distribute, loss)


def ctc(distribute: Distribute) -> Any:
    x = torch.randn(13, 7, 6, generator=torch.Generator().manual_seed(8))
    lengths = 1 + torch.arange(13) % 3
    data = TensorDataset(x, 1 + torch.arange(39).view(13, 3) % 4, 5 + torch.arange(13) % 3, lengths)

    def loss(model: nn.Module, x: Tensor, y: Tensor, heard: Tensor, written: Tensor) -> Tensor:
        return F.ctc_loss(model(x).log_softmax(-1).transpose(0, 1), y, heard, written, zero_infinity=True)

    return fit(distribute, loss, mlp(5), data)


def learned_weights_of_tasks(distribute: Distribute) -> Any:
    def loss(model: Any, x: Tensor, y: Tensor) -> Tensor:
        out = model(x)
        parts = torch.stack([F.cross_entropy(out[:, :3], y), F.mse_loss(out[:, 3], x.sum(1))])
        return (parts * torch.exp(-model.log_variance) + model.log_variance).sum()

    net = mlp(4)
    net.log_variance = nn.Parameter(torch.zeros(2))
    return fit(distribute, loss, net)


def learned_temperature_and_penalty(distribute: Distribute) -> Any:
    model, heat = mlp(), nn.Parameter(torch.tensor(0.5))
    optimizer = torch.optim.Adam([*model.parameters(), heat], 0.02)
    loader = DataLoader(rows(), batch_size=8, shuffle=True)
    model, optimizer, loader = distribute(model, optimizer, loader)
    losses = []
    for x, y in loader:
        loss = F.cross_entropy(model(x) / heat.exp(), y)
        loss = loss + 1e-2 * sum(p.pow(2).sum() for p in model.parameters()) + 1e-3 * model[0].weight.abs().mean()
        losses.append(step(loss, optimizer))
    return losses, heat.item(), weights(model)


def learned_tensor_of_no_model(distribute: Distribute) -> Any:
    model, shift = mlp(), torch.zeros(6, requires_grad=True)
    optimizer = torch.optim.SGD([{"params": model.parameters()}, {"params": [shift], "lr": 1.0}], 0.1)
    model, optimizer, loader = distribute(model, optimizer, DataLoader(rows(), batch_size=8, shuffle=True))
    for x, y in loader:
        step(F.cross_entropy(model(x + shift), y) + F.cross_entropy(model(shift[None]), y[:1]), optimizer)
    return shift.tolist(), shift.grad.tolist(), weights(model)


def regression_with_running_statistics(distribute: Distribute) -> Any:
    model, optimizer, loader = usual(distribute, mlp(1))
    mean, square, count = torch.zeros(6), torch.zeros(6), 0
    for _ in range(2):
        for x, _ in loader:
            count += len(x)
            mean += (x - mean).sum(0) / count
            square += ((x - mean) ** 2).sum(0)
            z = (x - mean) / (square / count + 1e-3).sqrt()
            step(F.mse_loss(model(z).squeeze(-1), x[:, 0] * x[:, 1]), optimizer)
    return mean.tolist(), (square / count).sqrt().tolist(), weights(model)


def robust_and_clamped(distribute: Distribute) -> Any:
    def loss(model: nn.Module, x: Tensor, _: Tensor) -> Tensor:
        error = model(x).squeeze(1) - x.prod(1)
        huber = torch.where(error.abs() < 0.5, 0.5 * error**2, 0.5 * (error.abs() - 0.25))
        high, low = error.max(), error.amin()
        return huber.mean() + error.clamp(-0.2, 1).var() + 0.1 * (high - low).relu() + error.std() + error.median() ** 2

    return fit(distribute, loss, mlp(1))


def hard_examples_and_curriculum(distribute: Distribute) -> Any:
    model, optimizer, loader = usual(distribute)
    used = []
    for epoch in range(3):
        for x, y in loader:
            each = F.cross_entropy(model(x), y, reduction="none")
            easy = each.detach() <= each.detach().quantile(0.4 + 0.3 * epoch)
            used.append(int(easy.sum()))
            hard = each.topk(max(1, len(each) // 2)).values.mean() + each.sort(descending=True)[0][:2].sum()
            kinds = [each[y == label].mean() for label in y.unique()]
            step(each[easy].mean() + 0.01 * (each * ~easy).sum() + 0.1 * hard + torch.stack(kinds).mean(), optimizer)
    return used, weights(model)


def hooks_of_losses(distribute: Distribute) -> Any:
    """Hooks see and change the gradients of means and losses, which may be kept too."""
    model, optimizer, loader = usual(distribute)
    left: list[Any] = []
    for x, y in loader:
        out = model(x)
        penalty, loss = out.square().mean(), F.cross_entropy(out, y)
        penalty.register_hook(lambda gradient: left.append(gradient.item()))
        loss.register_hook(lambda gradient: 2 * gradient)
        penalty.retain_grad()
        both = 3 * penalty + loss
        penalty.register_hook(lambda gradient: left.append(gradient.item()))
        left.extend(g.item() for g in torch.autograd.grad(both, [penalty, loss], retain_graph=True))
        left.append(step(both, optimizer))
        left.append(penalty.grad.item())
    return left, weights(model)
