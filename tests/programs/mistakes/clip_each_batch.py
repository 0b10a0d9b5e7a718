"""Gradients are clipped after each of two batches that add up. Expected: right, as on one device."""

# After https://github.com/huggingface/transformers/issues/1563

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import meshwise as mw

torch.manual_seed(0)
X = torch.randn(96, 4)
Y = X.sum(1, keepdim=True)
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
loader = DataLoader(TensorDataset(X, Y), batch_size=16)
model, optimizer, loader = mw.distribute(model, optimizer, loader, view="rank")
for epoch in range(2):
    for number, (x, y) in enumerate(loader):
        loss = mw.backward((model(x) - y).square().mean() / 2)
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)  # wrong
        if number % 2:
            # right: nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
    mw.print(f"epoch {epoch}: {loss.item():.5f}")
