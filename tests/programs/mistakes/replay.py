"""A replay buffer keeps samples of this rank alone: older ones than on one device once it is full. Expected: check."""

# After https://github.com/lightly-ai/lightly/issues/1018: a bank of samples that is not gathered

import random

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import meshwise as mw

torch.manual_seed(0)
random.seed(0)
X = torch.randn(192, 4)
y = X.sum(1, keepdim=True)
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
loader = DataLoader(TensorDataset(X, y), batch_size=16)  # wrong
model, optimizer, loader = mw.distribute(model, optimizer, loader, view="rank")  # wrong
# right: model, optimizer = mw.distribute(model, optimizer, view="rank")
buffer: list[tuple[torch.Tensor, torch.Tensor]] = []
for x, target in loader:  # wrong
# right: for x, target in DataLoader(TensorDataset(X, y), batch_size=16):
    buffer.extend(zip(x, target))
    del buffer[:-64]
    picked = random.sample(buffer, min(16, len(buffer)))
    old_x, old_y = torch.stack([a for a, _ in picked]), torch.stack([b for _, b in picked])
    loss = mw.backward((model(torch.cat([x, old_x])) - torch.cat([target, old_y])).square().mean())  # wrong
    # right: mine, wanted = mw.split(torch.cat([x, old_x]), torch.cat([target, old_y]))
    # right: loss = mw.backward((model(mine) - wanted).square().mean())
    optimizer.step()
    optimizer.zero_grad()
mw.print(f"loss {loss.item():.6f}")
