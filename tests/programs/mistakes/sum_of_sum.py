"""`mw.sum` of what `mw.sum` gave. Expected: check."""

# After https://github.com/Lightning-AI/pytorch-lightning/issues/3713: all_reduce of an accuracy that is synchronised

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import meshwise as mw

torch.manual_seed(0)
X = torch.randn(100, 4)
labels = (X.sum(1) > 0).long()
model = nn.Linear(4, 2)
loader = DataLoader(TensorDataset(X, labels), batch_size=32)
model, loader = mw.distribute(model, loader, view="rank")
correct = torch.zeros(())
with torch.no_grad():
    for x, y in loader:
        correct += mw.sum(mw.sum((model(x).argmax(1) == y).sum()))  # wrong
        # right: correct += mw.mean((model(x).argmax(1) == y).float().mean()) * mw.sum(len(y))
mw.print(f"accuracy {correct.item() / len(labels):.4f}")
