"""The last batch has one sample, which batch norm cannot normalise: as on one device. Expected: refused."""

# After https://github.com/pytorch/pytorch/issues/7716: the last batch has one sample

# usual imports
torch.manual_seed(0)
X = torch.randn(65, 4)
Y = (X.sum(1) > 0).long()
model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(TensorDataset(X, Y), batch_size=16)  # wrong
# right: loader = DataLoader(TensorDataset(X, Y), batch_size=16, drop_last=True)
model, optimizer, loader = mw.distribute(model, optimizer, loader, view="rank")
for epoch in range(2):
    for x, y in loader:
        loss = mw.backward(nn.functional.cross_entropy(model(x), y))
        optimizer.step()
        optimizer.zero_grad()
    mw.print(f"epoch {epoch}: {loss:.4f}")
