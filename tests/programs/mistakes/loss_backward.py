"""loss.backward() is left as it was. Expected: refused, right."""

# After https://github.com/lucidrains/med-seg-diff-pytorch/pull/6: loss.backward() for accelerator.backward(loss)

# usual imports and rows
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
loader = DataLoader(TensorDataset(X, Y), batch_size=16)
model, optimizer, loader = mw.distribute(model, optimizer, loader, view="rank")
for epoch in range(2):
    for x, y in loader:
        loss = (model(x) - y).square().mean()  # wrong
        loss.backward()  # wrong
        # right: loss = mw.backward((model(x) - y).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    mw.print(f"epoch {epoch}: {loss.item():.5f}")
