"""The optimizer is made anew after mw.distribute. Expected: right, refused."""

# After https://github.com/huggingface/accelerate/pull/2177: an optimizer made anew behind prepare lost its groups

# usual imports and rows
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
loader = DataLoader(TensorDataset(X, Y), batch_size=16)
model, optimizer, loader = mw.distribute(model, optimizer, loader, view="rank")
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)  # wrong
for epoch in range(2):
    for x, y in loader:
        loss = mw.backward((model(x) - y).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    mw.print(f"epoch {epoch}: {loss.item():.5f}")
