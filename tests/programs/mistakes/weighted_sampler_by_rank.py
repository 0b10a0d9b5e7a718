"""Each rank draws other samples by weight. Expected: refused, right."""

# After https://github.com/Lightning-AI/pytorch-lightning/issues/10946

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler

import meshwise as mw

torch.manual_seed(0)
X = torch.randn(96, 4)
Y = X.sum(1, keepdim=True)
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
weights = torch.where(Y[:, 0] > 0, 1.0, 3.0)
sampler = WeightedRandomSampler(weights, 96, generator=torch.Generator().manual_seed(7 + mw.rank()))  # wrong
# right: sampler = WeightedRandomSampler(weights, 96, generator=torch.Generator().manual_seed(7))
loader = DataLoader(TensorDataset(X, Y), batch_size=16, sampler=sampler)
model, optimizer, loader = mw.distribute(model, optimizer, loader, view="rank")
for epoch in range(2):
    for x, y in loader:
        loss = mw.backward((model(x) - y).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    mw.print(f"epoch {epoch}: {loss.item():.5f}")
