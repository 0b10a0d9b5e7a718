"""The batch size is divided by the number of ranks as for DDP: half the batch, twice the steps. Expected: said."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import meshwise as mw

torch.manual_seed(0)
X = torch.randn(128, 4)
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(TensorDataset(X, X.sum(1, keepdim=True)), batch_size=32 // mw.world_size(), shuffle=True)  # wrong
# right: loader = DataLoader(TensorDataset(X, X.sum(1, keepdim=True)), batch_size=32, shuffle=True)
model, optimizer, loader = mw.distribute(model, optimizer, loader, view="rank")
steps = 0
for _ in range(2):
    for x, target in loader:
        loss = mw.backward((model(x) - target).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        steps += 1
mw.print(f"{steps} steps, loss {loss.item():.6f}")
