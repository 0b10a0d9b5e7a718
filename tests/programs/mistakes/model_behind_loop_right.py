"""Behind each epoch the model runs in evaluation mode, on rows that every rank holds. Expected: right."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import meshwise as mw

torch.manual_seed(0)
X = torch.randn(99, 4)
Y = X.sum(1, keepdim=True)
model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
loader = DataLoader(TensorDataset(X, Y), batch_size=16, shuffle=True)
model, optimizer, loader = mw.distribute(model, optimizer, loader)
for epoch in range(2):
    for x, y in loader:
        mw.backward((model(x) - y).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    with torch.no_grad():
        guess = model(X[:8]).mean()
    model.train()
    mw.print(f"epoch {epoch}: a guess {guess.item():.5f}")
