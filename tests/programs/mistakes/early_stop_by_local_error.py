"""Each rank stops early by the error of its own part. Expected: refused, said."""

# After https://github.com/Lightning-AI/pytorch-lightning/issues/379

# usual imports and rows
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
loader = DataLoader(TensorDataset(X, Y), batch_size=16)
val_loader = DataLoader(TensorDataset(X[:32], Y[:32]), batch_size=32)
model, optimizer, loader, val_loader = mw.distribute(model, optimizer, loader, val_loader, view="rank")
for epoch in range(20):  # noqa: B007
    for x, y in loader:
        mw.backward((model(x) - y).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    error = 0.0
    with torch.no_grad():
        for x, y in val_loader:
            error += (model(x) - y).square().mean().item()  # wrong
            # right: error += mw.sum((model(x) - y).square().sum().item()) / 32
    if error < 0.5:
        break
mw.print(f"epochs {epoch} error {error:.5f}")
