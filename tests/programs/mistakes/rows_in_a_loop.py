"""The loss of each row is added up in a Python loop: a sum over this rank's samples. Expected: check."""

# After https://github.com/shubham-goel/4D-Humans/issues/85: the loss is an undivided sum over the batch (no loop there)

# usual imports
torch.manual_seed(0)
X = torch.randn(64, 4)
labels = (X.sum(1) > 0).long()
model = nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
loader = DataLoader(TensorDataset(X, labels), batch_size=16)
model, optimizer, loader = mw.distribute(model, optimizer, loader, view="rank")
for x, y in loader:
    loss = 0
    for i in range(len(x)):
        loss = loss + nn.functional.cross_entropy(model(x[i : i + 1]), y[i : i + 1])
    total = mw.backward(loss)  # wrong
    # right: total = mw.backward(loss / len(x))
    optimizer.step()
    optimizer.zero_grad()
mw.print(f"loss {total.item():.6f}")
