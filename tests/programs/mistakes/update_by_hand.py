"""Parameters are updated by hand, after loss.backward(). Expected: said."""

# After https://github.com/iCog-Labs-Dev/PC-Transformers/pull/135: weights written by hand pass DDP by

# usual imports and rows
model = nn.Linear(4, 1)
loader = DataLoader(TensorDataset(X, Y), batch_size=16)
model, loader = mw.distribute(model, loader, view="rank")
for epoch in range(2):
    for x, y in loader:
        loss = (model(x) - y).square().mean()  # wrong
        loss.backward()  # wrong
        # right: loss = mw.backward((model(x) - y).square().mean())
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.05 * parameter.grad
                parameter.grad = None
    mw.print(f"epoch {epoch}: {loss.item():.5f}")
