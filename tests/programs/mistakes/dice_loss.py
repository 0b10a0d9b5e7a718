"""A Dice loss over the batch, a ratio of sums in one line, is of each rank's own samples. Expected: said."""

# After https://github.com/microsoft/InnerEye-DeepLearning/issues/504: the soft Dice of each GPU alone

# usual imports
torch.manual_seed(0)
X = torch.randn(96, 1, 8, 8)
masks = (X.cumsum(2) + 0.5 * torch.randn_like(X) > 1).float()
model = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 1, 3, padding=1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
loader = DataLoader(TensorDataset(X, masks), batch_size=16)
model, optimizer, loader = mw.distribute(model, optimizer, loader, view="rank")
for _ in range(3):
    for x, y in loader:
        p = model(x).sigmoid()
        loss = mw.backward(1 - 2 * (p * y).sum() / (p.sum() + y.sum()))  # wrong
        # right: both, each = mw.sum((p * y).sum(), grad=True), mw.sum((p + y).sum(), grad=True)
        # right: loss = mw.backward(1 - 2 * both / each)
        optimizer.step()
        optimizer.zero_grad()
mw.print(f"loss {loss.item():.6f}")
