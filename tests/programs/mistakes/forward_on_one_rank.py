"""Rank 0 alone runs the model forward. Expected: right, refused."""

# After https://github.com/pytorch/pytorch/issues/89716: one rank alone runs a forward, and hangs

# usual imports and rows
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
loader = DataLoader(TensorDataset(X, Y), batch_size=16)
model, optimizer, loader = mw.distribute(model, optimizer, loader, view="rank")
for epoch in range(2):
    for x, y in loader:
        loss = mw.backward((model(x) - y).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    mw.print(f"epoch {epoch}: {loss.item():.5f}")
model.eval()
if mw.is_main():  # wrong
# right: with torch.no_grad():
    guess = model(X[:4]).sum().item()
    print(f"guess {guess:.5f}")  # wrong
# right: mw.print(f"guess {guess:.5f}")
