"""A mean over tokens that are not padding, whose number ranks have apart. Expected: said, refused, check."""

# After https://github.com/PrimeIntellect-ai/prime-rl/pull/1960: a token weighs more on a rank with fewer of them

# usual imports
torch.manual_seed(0)
X = torch.randn(96, 12, 4)
mask = (torch.arange(12) < torch.randint(1, 13, (96, 1))).float()
Y = X.sum(2)
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
loader = DataLoader(TensorDataset(X, Y, mask), batch_size=16)
model, optimizer, loader = mw.distribute(model, optimizer, loader, view="rank")
for epoch in range(2):
    for x, y, m in loader:
        each = (model(x)[..., 0] - y).square() * m
        loss = mw.backward(each.sum() / m.sum())  # wrong
        # right: loss = mw.backward(each.sum() / m.sum(), weight=m.sum())
        optimizer.step()
        optimizer.zero_grad()
    mw.print(f"epoch {epoch}: {loss.item():.5f}")
