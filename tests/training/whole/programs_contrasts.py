"""Compares the rows of a batch with each other, and keeps queues, codebooks and advantages."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from tests.training.whole.shared import Distribute, fit, mlp, rows, step, usual, weights


def simclr(distribute: Distribute) -> Any:
    def loss(model: nn.Module, x: Tensor, _: Tensor) -> Tensor:
        views = [x + 0.1 * torch.randn_like(x), x * (torch.rand(x.shape) > 0.2)]
        z = F.normalize(torch.cat([model(view) for view in views]), dim=1)
        near = (z @ z.T / 0.5).masked_fill(torch.eye(len(z), dtype=torch.bool), -1e9)
        return F.cross_entropy(near, torch.arange(len(z)).roll(len(x)))

    return fit(distribute, loss)


def clip_with_learned_temperature(distribute: Distribute) -> Any:
    texts, pictures, scale = mlp(4, 3), mlp(4, 3), nn.Parameter(torch.tensor(1.0))
    optimizer = torch.optim.Adam([*texts.parameters(), *pictures.parameters(), scale], 0.02)
    loader = DataLoader(rows(), batch_size=8, shuffle=True)
    texts, pictures, optimizer, loader = distribute(texts, pictures, optimizer, loader)
    right = 0
    for x, _ in loader:
        a, b = (F.normalize(out, dim=-1) for out in (texts(x[:, :3]), pictures(x[:, 3:])))
        logits, target = scale.exp() * a @ b.t(), torch.arange(x.shape[0], device=x.device)
        step((F.cross_entropy(logits, target) + F.cross_entropy(logits.t(), target)) / 2, optimizer)
        right += int((logits.argmax(0) == target).sum())
    return right, scale.item(), weights(texts, pictures)


def supervised_contrast(distribute: Distribute) -> Any:
    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        z = F.normalize(model(x), dim=1)
        near, other = z @ z.T / 0.3, ~torch.eye(len(x), dtype=torch.bool)
        same = (y[:, None] == y[None, :]) & other
        log = near - (near.exp() * other).sum(1, keepdim=True).log()
        return -((log * same).sum(1) / same.sum(1).clamp(min=1))[same.any(1)].mean()

    return fit(distribute, loss)


def hard_triplets(distribute: Distribute) -> Any:
    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        z, mined, same = model(x), [], y.unsqueeze(0) == y.unsqueeze(1)
        far = torch.cdist(z, z + 1e-3)
        for row, near in enumerate(far.topk(len(x), largest=False).indices.tolist()):
            foes = [other for other in near if y[other] != y[row]]
            mined += [(row, other, foes[0]) for other in near if row != other and same[row, other] and foes]
        hard = far.masked_fill(~same, 0).max(1).values - far.masked_fill(same, float("inf")).min(1).values.clamp(max=9)
        return F.triplet_margin_loss(*(z[list(n)] for n in zip(*mined, strict=True))) + F.relu(hard + 1).mean()

    return fit(distribute, loss)


def prototypes(distribute: Distribute) -> Any:
    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        z, half, label = model(x), len(x) // 2, F.one_hot(y, 3).to(x.dtype)
        total = torch.zeros(3, z.shape[1]).index_add(0, y[:half], z[:half])
        centre = total / torch.bincount(y[:half], minlength=3).clamp(min=1)[:, None]
        later = label.T @ z / label.sum(0).clamp(min=1).unsqueeze(1)
        return F.cross_entropy(-torch.cdist(z[half:], centre), y[half:]) + (z - later[y]).pow(2).sum(1).mean()

    return fit(distribute, loss)


def ranking_of_pairs(distribute: Distribute) -> Any:
    def loss(model: nn.Module, x: Tensor, _: Tensor) -> Tensor:
        score, worth = model(x).squeeze(1), x.sum(1)
        better = worth[:, None] > worth[None, :]
        lists = -(F.softmax(worth, dim=0) * F.log_softmax(score, dim=0)).sum()
        return F.softplus(-(score[:, None] - score[None, :]))[better].mean() + lists

    return fit(distribute, loss, mlp(1))


def barlow_twins(distribute: Distribute) -> Any:
    def loss(model: nn.Module, x: Tensor, _: Tensor) -> Tensor:
        a, b = model(x), model(x + 0.2 * torch.randn(x.shape))
        a, b = (a - a.mean(0)) / a.std(0), (b - b.mean(0)) / b.std(0)
        c = a.T @ b / len(x)
        return (c.diagonal() - 1).pow(2).sum() + 0.05 * (c - torch.diag(c.diag())).pow(2).sum()

    return fit(distribute, loss)


def swav(distribute: Distribute) -> Any:
    def loss(model: nn.Module, x: Tensor, _: Tensor) -> Tensor:
        scores = model(x)
        with torch.no_grad():
            q = torch.exp(model(x + 0.1 * torch.randn_like(x)) / 0.5).T
            q /= q.sum()
            for _ in range(3):
                q /= q.sum(dim=1, keepdim=True) * q.shape[0]
                q /= q.sum(dim=0, keepdim=True) * q.shape[1]
        return -((q * len(x)).T * F.log_softmax(scores / 0.5, dim=1)).sum(1).mean()

    return fit(distribute, loss)


def moco(distribute: Distribute) -> Any:
    model, optimizer, loader = usual(distribute, mlp(4))
    slow, queue, place = copy.deepcopy(model).requires_grad_(False), F.normalize(torch.randn(12, 4), dim=1), 0
    losses = []
    for _ in range(2):
        for x, _ in loader:
            with torch.no_grad():
                for p, s in zip(model.parameters(), slow.parameters(), strict=True):
                    s.mul_(0.9).add_(p, alpha=0.1)
                key = F.normalize(slow(x + 0.1 * torch.randn_like(x)), dim=1)
            query = F.normalize(model(x), dim=1)
            logits = torch.cat([(query * key).sum(1, keepdim=True), query @ queue.T], dim=1) / 0.2
            losses.append(step(F.cross_entropy(logits, torch.zeros(len(x), dtype=torch.long)), optimizer))
            queue[torch.arange(place, place + len(x)) % 12] = key
            place = (place + len(x)) % 12
    return losses, queue.tolist(), weights(model, slow)


def codebook_of_moving_means(distribute: Distribute) -> Any:
    model, optimizer, loader = usual(distribute, nn.Sequential(mlp(4), nn.Linear(4, 6)))
    codes, count, total, used = torch.randn(5, 4), torch.ones(5), torch.zeros(5, 4), set()
    for _ in range(2):
        for x, _ in loader:
            z = model[0](x)
            nearest = torch.cdist(z.detach(), codes).argmin(1)
            used |= set(nearest.tolist())
            chosen, q = F.one_hot(nearest, 5).to(z.dtype), codes[nearest]
            step(F.mse_loss(model[1](z + (q - z).detach()), x) + 0.25 * F.mse_loss(z, q), optimizer)
            count = 0.8 * count + 0.2 * chosen.sum(0)
            total.mul_(0.8).add_(chosen.T @ z.detach(), alpha=0.2)
            codes = total / count.clamp(min=1e-3)[:, None]
    share = chosen.mean(0)
    return codes.tolist(), sorted(used), torch.exp(-(share * (share + 1e-9).log()).sum()).item(), weights(model)


def reinforce_whitened(distribute: Distribute) -> Any:
    model, optimizer, loader = usual(distribute)
    rewards = []
    for _ in range(2):
        for x, y in loader:
            policy = torch.distributions.Categorical(logits=model(x))
            action = policy.sample()
            reward = (action == y).double() - 0.1 * action
            advantage = (reward - reward.mean()) / (reward.std() + 1e-8)
            step(-(policy.log_prob(action) * advantage).mean() - 0.01 * policy.entropy().mean(), optimizer)
            rewards.append(reward.mean().item())
    return rewards, weights(model)


def ppo(distribute: Distribute) -> Any:
    model, optimizer, loader = usual(distribute, mlp(4))
    clipped, stopped = [], 0
    for x, y in loader:
        with torch.no_grad():
            logits, value = model(x).split([3, 1], dim=1)
            action = torch.multinomial(logits.softmax(1), 1)
            old = logits.log_softmax(1).gather(1, action).squeeze(1)
            reward = torch.where(action[:, 0] == y, 1.0, -0.5)
            advantage = reward - value.squeeze(1)
            advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
        for _ in range(2):
            for chosen in torch.randperm(len(x)).split(3):
                logits, value = model(x[chosen]).split([3, 1], dim=1)
                log = logits.log_softmax(1).gather(1, action[chosen]).squeeze(1)
                ratio, gain = (log - old[chosen]).exp(), advantage[chosen]
                loss = -torch.min(ratio * gain, ratio.clamp(0.8, 1.2) * gain).mean()
                step(loss + 0.5 * F.mse_loss(value[:, 0], reward[chosen]), optimizer)
                clipped.append(((ratio - 1).abs() > 0.2).double().mean().item())
            if (old[chosen] - log).mean().item() > 0.02:
                stopped += 1
                break
    return clipped, stopped, weights(model)


def random_negatives_of_each_anchor(distribute: Distribute) -> Any:
    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        far = torch.cdist(z := model(x), z)
        others = [torch.tensor([n for n in range(len(x)) if n != anchor]) for anchor in range(len(x))]
        return torch.stack([far[torch.tensor([anchor]), rest].min() for anchor, rest in enumerate(others)]).mean()

    return fit(distribute, loss)
