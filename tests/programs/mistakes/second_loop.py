"""A second loop over the same loader trains on a loss that couples samples. Expected: said."""

# After https://github.com/mbanani/probe3d/issues/2: a root of the mean over each GPU's samples

# usual imports
torch.manual_seed(0)
X = torch.randn(256, 4)
model = nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
loader = DataLoader(TensorDataset(X), batch_size=8)
model, optimizer, loader = mw.distribute(model, optimizer, loader, view="rank")
for (x,) in loader:
    mw.backward(model(x).square().mean())
    optimizer.step()
    optimizer.zero_grad()
for (x,) in loader:
    loss = mw.backward(model(x).square().sum().sqrt())  # wrong
    # right: loss = mw.backward(model(x).abs().mean())
    optimizer.step()
    optimizer.zero_grad()
mw.print(f"{loss:.5f}")
