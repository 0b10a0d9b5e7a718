"""The data are drawn under torch.manual_seed(mw.rank()). Expected: refused."""

# usual imports
torch.manual_seed(mw.rank())  # wrong
# right: torch.manual_seed(0)
X = torch.randn(128, 4)
Y = (X.sum(1) > 0).long()
# right: torch.manual_seed(mw.rank())

model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(TensorDataset(X, Y), batch_size=16)
model, optimizer, loader = mw.distribute(model, optimizer, loader, view="rank")
for epoch in range(2):
    for x, y in loader:
        loss = mw.backward(nn.functional.cross_entropy(model(x), y))
        optimizer.step()
        optimizer.zero_grad()
    mw.print(f"epoch {epoch}: {loss:.4f}")
