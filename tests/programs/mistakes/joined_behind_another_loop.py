"""What a loop whose last batch is padded has added up is joined behind a later loop. Expected: check."""

# usual imports
torch.manual_seed(0)
model = nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
first = DataLoader(TensorDataset(torch.randn(9, 2)), batch_size=4)
second = DataLoader(TensorDataset(torch.randn(12, 2)), batch_size=3)
model, optimizer, first, second = mw.distribute(model, optimizer, first, second, view="rank")
for (x,) in second:
    mw.backward(model(x).square().mean())
    optimizer.step()
    optimizer.zero_grad()
total = 0.0
with torch.no_grad():
    for (x,) in first:
        total += model(x).sum().item()  # wrong
        # right: total += mw.sum(model(x).sum().item())
    other = 0
    for (x,) in second:
        other += mw.sum(len(x))
mw.print(f"{mw.sum(total):.5f} {other}")  # wrong
# right: mw.print(f"{total:.5f} {other}")
