"""Rank 0 alone loads the state. Expected: refused, said."""

# After https://github.com/vllm-project/speculators/pull/926

# usual imports and rows
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
loader = DataLoader(TensorDataset(X, Y), batch_size=16)
model, optimizer, loader = mw.distribute(model, optimizer, loader, view="rank")
for epoch in range(2):
    for x, y in loader:
        loss = mw.backward((model(x) - y).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    mw.print(f"epoch {epoch}: {loss.item():.5f}")
mw.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, "state.pt")
if mw.is_main():  # wrong
    state = torch.load("state.pt")  # wrong
    model.load_state_dict(state["model"])  # wrong
    optimizer.load_state_dict(state["optimizer"])  # wrong
# right: state = mw.load("state.pt")
# right: model.load_state_dict(state["model"])
# right: optimizer.load_state_dict(state["optimizer"])
for x, y in loader:
    loss = mw.backward((model(x) - y).square().mean())
    optimizer.step()
    optimizer.zero_grad()
mw.print(f"resumed: {loss.item():.5f}")
