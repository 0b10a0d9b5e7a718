"""A bad row weighs nothing in the loss, and every rank runs the forward (--set shard=2). Expected: right."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import meshwise as mw

torch.manual_seed(0)
X = torch.randn(96, 4)
X[20] = 100.0
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
loader = DataLoader(TensorDataset(X), batch_size=16)
model, optimizer, loader = mw.distribute(model, optimizer, loader)
for (x,) in loader:
    good = (x.abs().amax(1) <= 10).float()
    loss = (model(x).square().squeeze(1) * good).sum() / good.sum()
    loss = mw.backward(loss, weight=good.sum())
    optimizer.step()
    optimizer.zero_grad()
mw.print(f"loss {loss.item():.5f}")
