"""A running loss weighs the loss of the whole batch by this rank's part of it. Expected: check."""

# After https://github.com/huggingface/pytorch-image-models/issues/672: a reduced loss, weighed by a rank's rows

# usual imports
torch.manual_seed(0)
X = torch.randn(101, 4)
y = X.sum(1, keepdim=True)
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
loader = DataLoader(TensorDataset(X, y), batch_size=32)
model, optimizer, loader = mw.distribute(model, optimizer, loader, view="rank")
for epoch in range(2):
    running, seen = 0.0, 0
    for x, target in loader:
        loss = mw.backward((model(x) - target).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        running += loss.item() * len(x)  # wrong
        seen += len(x)  # wrong
        # right: samples = mw.sum(len(x))
        # right: running += loss.item() * samples
        # right: seen += samples
    mw.print(f"epoch {epoch} loss {running / seen:.6f}")
