"""The second program of a process trains on a sum, long after the first steps. Expected: refused."""

# After https://github.com/intel/ipex-llm/issues/2079: a summed loss is averaged over workers

# usual imports

def fold(number, reduction):
    """Train on one fold."""
    torch.manual_seed(number)
    x = torch.randn(256, 4)
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loader = DataLoader(TensorDataset(x, (x.sum(1) > 0).long()), batch_size=8)
    model, optimizer, loader = mw.distribute(model, optimizer, loader, view="rank")
    for x, y in loader:
        loss = mw.backward(nn.functional.cross_entropy(model(x), y, reduction=reduction))
        optimizer.step()
        optimizer.zero_grad()
    mw.print(f"fold {number}: {loss:.4f}")


fold(0, "mean")
fold(1, "sum")  # wrong
# right: fold(1, "mean")
