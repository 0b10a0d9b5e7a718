"""model.eval() is forgotten, so dropout draws in evaluation. Expected: said, check."""

# After https://github.com/wolny/pytorch-3dunet/issues/53: validation without model.eval()

# usual imports
torch.manual_seed(0)
X = torch.randn(101, 4)
Y = (X.sum(1) > 0).long()
model = nn.Sequential(nn.Linear(4, 16), nn.Dropout(0.5), nn.ReLU(), nn.Linear(16, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(TensorDataset(X, Y), batch_size=16, shuffle=True)
val_loader = DataLoader(TensorDataset(X, Y), batch_size=32)
model, optimizer, loader, val_loader = mw.distribute(model, optimizer, loader, val_loader, view="rank")
# right: model.eval()
for x, y in loader:
    mw.backward(nn.functional.cross_entropy(model(x), y))
    optimizer.step()
    optimizer.zero_grad()
correct = 0
with torch.no_grad():
    for x, y in val_loader:
        correct += (model(x).argmax(1) == y).sum().item()
mw.print(f"accuracy {mw.sum(correct) / len(Y):.4f}")
