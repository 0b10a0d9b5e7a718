"""A layer is made inside the first forward: every rank draws its own weights. Expected: refused."""

# After https://github.com/prism-science/WaterFlow/pull/78: a Linear is made in the first forward

# usual imports

class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.head: nn.Module | None = None  # wrong
        # right: self.head = nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(self.first(x))
        if self.head is None:  # wrong
            self.head = nn.Linear(hidden.shape[1], 2)  # wrong
        return self.head(hidden)  # wrong
        # right: norm = nn.LayerNorm(hidden.shape[1])
        # right: return self.head(norm(hidden))


torch.manual_seed(0)
X = torch.randn(64, 4)
labels = (X.sum(1) > 0).long()
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(TensorDataset(X, labels), batch_size=16)
model, optimizer, loader = mw.distribute(model, optimizer, loader, view="rank")
for x, y in loader:
    loss = mw.backward(nn.functional.cross_entropy(model(x), y))
    optimizer.step()
    optimizer.zero_grad()
mw.print(f"loss {loss.item():.6f}")
