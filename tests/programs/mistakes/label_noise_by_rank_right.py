"""Samples are augmented at random where they are read, and the ranks are seeded apart. Expected: right."""

# After https://github.com/kekmodel/FixMatch-pytorch/issues/5: each process draws which samples have labels

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import meshwise as mw


class Noisy(Dataset):
    """Adds noise to what is read."""

    def __init__(self, x, y, generator=None):
        self.x, self.y, self.generator = x, y, generator

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        noise = torch.randn(4, generator=self.generator)
        return self.x[index] + 0.1 * noise, self.y[index]


torch.manual_seed(0)
X = torch.randn(128, 4)
Y = (X.sum(1) > 0).long()
torch.manual_seed(mw.rank())

model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(Noisy(X, Y), batch_size=16)
model, optimizer, loader = mw.distribute(model, optimizer, loader)
for epoch in range(2):
    for x, y in loader:
        loss = mw.backward(nn.functional.cross_entropy(model(x), y))
        optimizer.step()
        optimizer.zero_grad()
    mw.print(f"epoch {epoch}: {loss:.4f}")
