"""A DistributedSampler of DDP is left in the loader. Expected: right."""

import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset  # wrong
# right: from torch.utils.data import DataLoader, TensorDataset

import meshwise as mw

torch.manual_seed(0)
X = torch.randn(96, 4)
Y = X.sum(1, keepdim=True)
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
data = TensorDataset(X, Y)  # wrong
sampler = DistributedSampler(data, mw.world_size(), mw.rank(), shuffle=False)  # wrong
loader = DataLoader(data, batch_size=16, sampler=sampler)  # wrong
# right: loader = DataLoader(TensorDataset(X, Y), batch_size=16, shuffle=True)
model, optimizer, loader = mw.distribute(model, optimizer, loader, view="rank")
for epoch in range(2):
    for x, y in loader:
        loss = mw.backward((model(x) - y).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    mw.print(f"epoch {epoch}: {loss.item():.5f}")
