"""A script that keeps its own loop, as a user writes it, and the ways in which a user gets it wrong."""

from __future__ import annotations

SCRIPT = """
import argparse
import random

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import meshwise as mw

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=2)
options = parser.parse_args()

torch.manual_seed(0)
x = torch.from_numpy(np.random.default_rng(7).standard_normal((64, 6), dtype=np.float32))
y = (x.sum(1) > 0).long()


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 64)
        self.norm = nn.BatchNorm1d(64)
        self.drop = nn.Dropout(0.2)
        self.blocks = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(3)])
        self.head = nn.Linear(64, 2)

    def forward(self, x):
        return self.head(self.blocks(self.drop(self.norm(self.first(x))))).float()


model = Net()
criterion = nn.CrossEntropyLoss(weight=torch.tensor([0.4, 0.6]))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
loader = DataLoader(TensorDataset(x, y), batch_size=8, shuffle=True)
held_out = DataLoader(TensorDataset(x[:21], y[:21]), batch_size=6)
# before
model, optimizer, scheduler, loader, held_out = mw.distribute(
    model, optimizer, scheduler, loader, held_out, view="rank"
)
# after
for epoch in range(options.epochs):
    model.train()
    for x, y in loader:
        loss = criterion(model(x), y)
        # a mean over class weights, not over samples
        mw.backward(loss, weight=torch.tensor([0.4, 0.6])[y].sum())
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    model.eval()
    correct = 0
    with torch.no_grad():
        for x, y in held_out:
            right = (model(x).argmax(1) == y).sum().item()
            correct += mw.sum(right)
    mw.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, "state.pt")
    print(f"epoch {epoch}: {correct / 21:.3f}")
"""

WRONG = {
    "plain backward": ("mw.backward(loss, weight=torch.tensor([0.4, 0.6])[y].sum())", "loss.backward()"),
    "evaluation of one share": ("correct += mw.sum(right)", "correct += right"),
    "a loader not given": (
        '= mw.distribute(\n    model, optimizer, scheduler, loader, held_out, view="rank"\n)',
        '= *mw.distribute(model, optimizer, scheduler, loader, view="rank"), held_out',
    ),
    "mean over the rank's own samples": (", weight=torch.tensor([0.4, 0.6])[y].sum())", ")"),
    "divided by the rank's own count": (
        "loss = criterion(model(x), y)",
        "loss = nn.functional.cross_entropy(model(x), y, reduction='sum') / 8 * mw.world_size() ** 0",
    ),
    "learning rate times ranks": ("lr=0.01", "lr=0.01 * mw.world_size()"),
    "a seed for each rank": ("loss = criterion(model(x), y)", "loss = criterion(model(x + noise(x)), y)"),
    "an optimizer of another model": ("optimizer = torch.optim.AdamW(model", "optimizer = torch.optim.AdamW(Net()"),
    "an optimizer not given": (
        "mw.distribute(\n    model, optimizer, scheduler",
        "mw.distribute(\n    model, scheduler, scheduler",
    ),
    "a scheduler for each rank": ("scheduler.step()", "[scheduler.step() for _ in range(mw.world_size())]"),
    "batches for one rank": ("    for x, y in loader:", "    for x, y in list(loader)[mw.rank():]:"),
    "steps of one rank": ("optimizer.step()", "optimizer.step() if mw.rank() == 0 else None"),
    "weights changed on one rank": (
        "optimizer.zero_grad()\n",
        "optimizer.zero_grad()\n        model.norm.bias.data.add_(0.01 * mw.rank())\n",
    ),
}


def wrong(name: str) -> str:
    """The script with one mistake in it."""
    right, instead = WRONG[name]
    assert SCRIPT.count(right) == 1, name
    text = SCRIPT.replace(right, instead)
    if name == "a seed for each rank":
        noise = "generator = torch.Generator().manual_seed(mw.rank())\n\n\ndef noise(x):\n"
        noise += "    return 0.1 * torch.randn(x.shape, generator=generator, dtype=x.dtype)\n"
        text = text.replace("# after", noise)
    if name == "an optimizer not given":
        text = text.replace(
            "model, optimizer, scheduler, loader, held_out = ", "model, scheduler, _, loader, held_out = "
        )
    return text
