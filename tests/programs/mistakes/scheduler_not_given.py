"""The scheduler is not given to mw.distribute. Expected: right."""

# usual imports and rows
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
loader = DataLoader(TensorDataset(X, Y), batch_size=16)
model, optimizer, loader = mw.distribute(model, optimizer, loader, view="rank")  # wrong
# right: model, optimizer, scheduler, loader = mw.distribute(model, optimizer, scheduler, loader, view="rank")
for epoch in range(2):
    for x, y in loader:
        loss = mw.backward((model(x) - y).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    scheduler.step()
    mw.print(f"epoch {epoch}: {loss.item():.5f}")
