"""All ranks write one file. Expected: said, refused."""

# After https://github.com/pytorch/pytorch/issues/73168

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
    mw.print(f"epoch {epoch}: {loss.item():.5f}")
torch.save(model.state_dict(), "weights.pt")  # wrong
# right: mw.save(model.state_dict(), "weights.pt")
mw.barrier()
mw.print(f"saved {sum(v.sum() for v in torch.load('weights.pt').values()):.5f}")
