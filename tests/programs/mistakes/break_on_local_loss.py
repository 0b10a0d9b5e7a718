"""A rank leaves the loop by the loss of its own rows. Expected: check."""

# usual imports and rows
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
loader = DataLoader(TensorDataset(X, Y), batch_size=16)
model, optimizer, loader = mw.distribute(model, optimizer, loader, view="rank")
for epoch in range(2):
    for x, y in loader:
        loss = (model(x) - y).square().mean()  # wrong
        mw.backward(loss)  # wrong
        # right: loss = mw.backward((model(x) - y).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        if loss.item() < 3.0:
            break
    mw.print(f"epoch {epoch}: {loss.item():.5f}")
