"""One rank skips the forward of a bad batch and gives a loss of 0 (--set shard=2). Expected: refused."""

# usual imports
torch.manual_seed(0)
X = torch.randn(96, 4)
X[20] = 100.0
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
loader = DataLoader(TensorDataset(X), batch_size=16)
model, optimizer, loader = mw.distribute(model, optimizer, loader, view="rank")
for (x,) in loader:
    bad = x.abs().max() > 10  # wrong
    loss = mw.backward(torch.zeros((), requires_grad=True) if bad else model(x).square().mean())  # wrong
    # right: good = (x.abs().amax(1) <= 10).float()
    # right: loss = (model(x).square().squeeze(1) * good).sum() / good.sum()
    # right: loss = mw.backward(loss, weight=good.sum())
    optimizer.step()
    optimizer.zero_grad()
mw.print(f"loss {loss.item():.5f}")
