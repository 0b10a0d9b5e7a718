"""One sample is NaN, so the loss is from then on, and the file that is saved is worthless. Expected: said, exit 1."""

# After https://github.com/mlfoundations/open_lm/pull/7: the loss is NaN, and training goes on and saves

# usual imports
torch.manual_seed(0)
X = torch.randn(64, 4)
y = X.sum(1, keepdim=True)
X[37] = float("nan")
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(TensorDataset(X, y), batch_size=8)
model, optimizer, loader = mw.distribute(model, optimizer, loader, view="rank")
for _ in range(3):
    for x, target in loader:
        loss = mw.backward((model(x) - target).square().mean())
        optimizer.step()  # wrong
        # right: if torch.isfinite(loss):
            # right: optimizer.step()
        optimizer.zero_grad()
mw.save(model.state_dict(), "weights.pt")
mw.print(f"loss {loss.item():.6f}")
