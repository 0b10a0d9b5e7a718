"""refused (--set tensor=2): weights are pruned after mw.distribute."""

# After https://github.com/microsoft/nni/issues/5205: a model is pruned inside DDP

import torch
from torch import nn
from torch.nn.utils import prune
from torch.utils.data import DataLoader, TensorDataset

import meshwise as mw

torch.manual_seed(0)
x = torch.randn(64, 8)
model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Tanh(), nn.Linear(16, 8))
# right: prune.l1_unstructured(model[3], "weight", 0.5)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(TensorDataset(x, x.sin()), batch_size=16)
model, optimizer, loader = mw.distribute(model, optimizer, loader, view="rank")
prune.l1_unstructured(model[3], "weight", 0.5)  # wrong
for epoch in range(2):
    for x, y in loader:
        loss = mw.backward(nn.functional.mse_loss(model(x), y))
        optimizer.step()
        optimizer.zero_grad()
    mw.print(f"epoch {epoch}: {loss:.6f}")
