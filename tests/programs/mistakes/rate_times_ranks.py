"""The learning rate is multiplied by the ranks, as for DDP. Expected: said, check."""

# After https://github.com/huggingface/accelerate/pull/1013

# usual imports and rows
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05 * mw.world_size())  # wrong
# right: optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
loader = DataLoader(TensorDataset(X, Y), batch_size=16)
model, optimizer, loader = mw.distribute(model, optimizer, loader, view="rank")
for epoch in range(2):
    for x, y in loader:
        loss = mw.backward((model(x) - y).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    mw.print(f"epoch {epoch}: {loss.item():.5f}")
