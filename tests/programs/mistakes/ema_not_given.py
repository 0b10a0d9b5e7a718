"""An average of the weights, with buffers, is not given to mw.distribute. Expected: right, refused."""

# usual imports and rows
model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
average = torch.optim.swa_utils.AveragedModel(
    model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9), use_buffers=True
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
loader = DataLoader(TensorDataset(X, Y), batch_size=16)
model, optimizer, loader = mw.distribute(model, optimizer, loader, view="rank")  # wrong
# right: model, average, optimizer, loader = mw.distribute(model, average, optimizer, loader, view="rank")
for x, y in loader:
    mw.backward((model(x) - y).square().mean())
    optimizer.step()
    optimizer.zero_grad()
    average.update_parameters(model)
average.eval()
error = 0.0
with torch.no_grad():
    for x, y in loader:
        error += (average(x) - y).square().sum().item()
mw.print(f"error {mw.sum(error) / len(Y):.5f}")
