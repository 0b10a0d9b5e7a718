"""The number of steps is divided by the ranks once more. Expected: said, refused, check."""

# After https://github.com/axolotl-ai-cloud/axolotl/pull/1566: steps are divided by the ranks again

# usual imports and rows
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
loader = DataLoader(TensorDataset(X, Y), batch_size=16)
model, optimizer, loader = mw.distribute(model, optimizer, loader, view="rank")
steps = 2 * len(loader) // mw.world_size()  # wrong
# right: steps = 2 * len(loader)
scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=steps)
for epoch in range(2):
    for x, y in loader:
        loss = mw.backward((model(x) - y).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    mw.print(f"epoch {epoch}: {loss.item():.5f}")
