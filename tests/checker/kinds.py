"""A short script, and what a stranger gets wrong in it: what its batches hold, what it steps with, where it goes on."""

from __future__ import annotations

SHORT = """
import contextlib
import random

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import meshwise as mw

torch.manual_seed(0)
x = torch.from_numpy(np.random.default_rng(7).standard_normal((64, 6), dtype=np.float32))
y = (x.sum(1) > 0).long()
data = TensorDataset(x, y)
model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 2))
# parts
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 20, 0.5)
loader = DataLoader(data, batch_size=8, shuffle=True)
held = DataLoader(TensorDataset(x[:21], y[:21]), batch_size=6)
model, optimizer, scheduler, loader, held = mw.distribute(model, optimizer, scheduler, loader, held, view="rank")
several = mw.world_size() > 1
for epoch in range(4):
    for number, (xb, yb) in enumerate(loader):
        loss = nn.functional.cross_entropy(model(xb), yb)
        mw.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    # epoch ends
"""
BACKWARD = "        mw.backward(loss)\n        optimizer.step()\n        optimizer.zero_grad()\n"
ACCUMULATED = """        with mw.accumulate() if number % 2 == 0 else contextlib.nullcontext():
            mw.backward(loss)
        # between
        if number % 2 == 1:
            optimizer.step()
            optimizer.zero_grad()
"""


def short(*changes: tuple[str, str]) -> str:
    """The script with these texts in the place of others."""
    text = SHORT
    for right, instead in changes:
        assert text.count(right) == 1, right
        text = text.replace(right, instead)
    return text


DATA_SET = '''
class Noisy(torch.utils.data.Dataset):
    """Adds noise to each sample that it gives."""

    def __init__(self, x, y):
        self.x, self.y, self.rng = x, y, np.random.default_rng(0)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return self.x[index] + 0.1 * torch.as_tensor(NOISE), self.y[index]


data = Noisy(x, y)
# parts
'''


def noisy(noise: str) -> tuple[str, str]:
    return "# parts\n", DATA_SET.replace("NOISE", noise)
