"""Gradients of two batches add up without mw.accumulate. Expected: right."""

# usual imports and rows
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
loader = DataLoader(TensorDataset(X, Y), batch_size=16)
model, optimizer, loader = mw.distribute(model, optimizer, loader, view="rank")
for epoch in range(2):
    for number, (x, y) in enumerate(loader):
        # right: if number % 2 == 0:
            # right: with mw.accumulate():
                # right: mw.backward((model(x) - y).square().mean() / 2)
            # right: continue
        loss = mw.backward((model(x) - y).square().mean() / 2)
        if number % 2:  # wrong
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)  # wrong
            optimizer.step()  # wrong
            optimizer.zero_grad()  # wrong
        # right: nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        # right: optimizer.step()
        # right: optimizer.zero_grad()
    mw.print(f"epoch {epoch}: {loss.item():.5f}")
