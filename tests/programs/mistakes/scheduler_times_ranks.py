"""The scheduler steps once for each rank. Expected: said, refused, check."""

# After https://github.com/huggingface/accelerate/issues/2926

# usual imports and rows
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
loader = DataLoader(TensorDataset(X, Y), batch_size=16)
model, optimizer, scheduler, loader = mw.distribute(model, optimizer, scheduler, loader, view="rank")
for epoch in range(2):
    for x, y in loader:
        loss = mw.backward((model(x) - y).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    for _ in range(mw.world_size()):  # wrong
        scheduler.step()  # wrong
    # right: scheduler.step()
    mw.print(f"epoch {epoch}: {loss.item():.5f}")
