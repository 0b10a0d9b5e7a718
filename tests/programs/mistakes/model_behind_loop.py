"""Behind each epoch the model runs once more, with dropout, on the batch that the loop gave last. Expected: check."""

# usual imports
torch.manual_seed(0)
X = torch.randn(99, 4)
Y = X.sum(1, keepdim=True)
model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1))  # wrong
# right: model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
loader = DataLoader(TensorDataset(X, Y), batch_size=16, shuffle=True)
model, optimizer, loader = mw.distribute(model, optimizer, loader, view="rank")
for epoch in range(2):
    for x, y in loader:
        mw.backward((model(x) - y).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    # right: model.eval()
    with torch.no_grad():
        guess = model(x).mean()  # wrong
        # right: guess = model(X[:8]).mean()
    # right: model.train()
    mw.print(f"epoch {epoch}: a guess {guess.item():.5f}")
