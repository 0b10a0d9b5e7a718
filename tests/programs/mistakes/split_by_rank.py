"""Each rank splits off other samples for validation. Expected: refused."""

# After https://github.com/Lightning-AI/pytorch-lightning/issues/7728

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split

import meshwise as mw

torch.manual_seed(0)
X = torch.randn(101, 4)
Y = (X.sum(1) > 0).long()
model = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
train, val = random_split(TensorDataset(X, Y), [69, 32], torch.Generator().manual_seed(7 + mw.rank()))  # wrong
# right: train, val = random_split(TensorDataset(X, Y), [69, 32], torch.Generator().manual_seed(7))
loader = DataLoader(train, batch_size=16, shuffle=True)
val_loader = DataLoader(val, batch_size=32)
model, optimizer, loader, val_loader = mw.distribute(model, optimizer, loader, val_loader, view="rank")
for x, y in loader:
    mw.backward(nn.functional.cross_entropy(model(x), y))
    optimizer.step()
    optimizer.zero_grad()
model.eval()
correct = 0
with torch.no_grad():
    for x, y in val_loader:
        correct += (model(x).argmax(1) == y).sum().item()
mw.print(f"accuracy {mw.sum(correct) / len(val):.4f}")
