"""The data are drawn under a seed of the environment's RANK. Expected: refused."""

# After https://github.com/sdogsq/LorentzNet-release/pull/1: local_rank is in the seed that orders the data

import os

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import meshwise as mw

torch.manual_seed(int(os.environ.get("RANK", 0)))  # wrong
# right: rank = int(os.environ.get("RANK", 0))
# right: torch.manual_seed(0)
X = torch.randn(128, 4)
Y = (X.sum(1) > 0).long()
# right: own = torch.Generator().manual_seed(rank)  # of this rank's log

model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(TensorDataset(X, Y), batch_size=16)
model, optimizer, loader = mw.distribute(model, optimizer, loader, view="rank")
for epoch in range(2):
    for x, y in loader:
        loss = mw.backward(nn.functional.cross_entropy(model(x), y))
        optimizer.step()
        optimizer.zero_grad()
    mw.print(f"epoch {epoch}: {loss:.4f}")
