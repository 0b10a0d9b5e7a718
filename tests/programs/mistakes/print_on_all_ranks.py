"""Every rank prints. Expected: right (once), or each line with its rank."""

# After https://github.com/open-mmlab/mmdetection/issues/5010: a print is shown once for each GPU

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
    print(f"epoch {epoch}: {loss.item():.5f}")  # wrong
    # right: mw.print(f"epoch {epoch}: {loss.item():.5f}")
