"""Labels get noise under a seed of each rank. Expected: refused."""

# After https://github.com/kekmodel/FixMatch-pytorch/issues/5: each process draws which samples have labels

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset  # wrong
# right: from torch.utils.data import DataLoader, Dataset

import meshwise as mw
# right:
# right:
# right: class Noisy(Dataset):
    # right: """Adds noise to what is read."""
# right:
    # right: def __init__(self, x, y, generator=None):
        # right: self.x, self.y, self.generator = x, y, generator
# right:
    # right: def __len__(self):
        # right: return len(self.x)
# right:
    # right: def __getitem__(self, index):
        # right: noise = torch.randn(4, generator=self.generator)
        # right: return self.x[index] + 0.1 * noise, self.y[index]
# right:

torch.manual_seed(0)
X = torch.randn(128, 4)
Y = (X.sum(1) > 0).long()
torch.manual_seed(mw.rank())
flipped = torch.rand(128) < 0.1  # wrong
Y[flipped] = 1 - Y[flipped]  # wrong

model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(TensorDataset(X, Y), batch_size=16)  # wrong
# right: loader = DataLoader(Noisy(X, Y), batch_size=16)
model, optimizer, loader = mw.distribute(model, optimizer, loader, view="rank")
for epoch in range(2):
    for x, y in loader:
        loss = mw.backward(nn.functional.cross_entropy(model(x), y))
        optimizer.step()
        optimizer.zero_grad()
    mw.print(f"epoch {epoch}: {loss:.4f}")
