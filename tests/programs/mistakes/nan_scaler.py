"""A learning rate under which parameters overflow, with a GradScaler that cannot help. Expected: said, exit 1."""

# After https://github.com/deepinsight/insightface/issues/2262: the loss is NaN, the scale 0, and training goes on

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import meshwise as mw

torch.manual_seed(0)
X = torch.randn(64, 4)
model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=1e6)  # wrong
scaler = torch.amp.GradScaler("cpu")  # wrong
# right: optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
# right: scaler = torch.amp.GradScaler("cpu", init_scale=2.0**120)
loader = DataLoader(TensorDataset(X, X.sum(1, keepdim=True)), batch_size=8)
model, optimizer, loader = mw.distribute(model, optimizer, loader, view="rank")
for _ in range(3):
    for x, target in loader:
        loss = mw.backward(scaler.scale((model(x) - target).square().mean()))
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
mw.print(f"loss {loss.item():.6f}")
