"""A layer norm without learned values is made inside a forward; learned layers are not. Expected: right."""

# After https://github.com/prism-science/WaterFlow/pull/78: a Linear is made in the first forward

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import meshwise as mw


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.head = nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(self.first(x))
        norm = nn.LayerNorm(hidden.shape[1])
        return self.head(norm(hidden))


torch.manual_seed(0)
X = torch.randn(64, 4)
labels = (X.sum(1) > 0).long()
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(TensorDataset(X, labels), batch_size=16)
model, optimizer, loader = mw.distribute(model, optimizer, loader)
for x, y in loader:
    loss = mw.backward(nn.functional.cross_entropy(model(x), y))
    optimizer.step()
    optimizer.zero_grad()
mw.print(f"loss {loss.item():.6f}")
