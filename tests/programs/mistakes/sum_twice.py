"""Right answers are added over ranks in the loop and after it: an accuracy above 1. Expected: check."""

# After https://github.com/facebookresearch/fairchem/pull/75: a total that is reduced already is reduced again

# usual imports
torch.manual_seed(0)
X = torch.randn(100, 4)
labels = (X.sum(1) > 0).long()
model = nn.Linear(4, 2)
loader = DataLoader(TensorDataset(X, labels), batch_size=32)
model, loader = mw.distribute(model, loader, view="rank")
model.eval()
correct = 0
with torch.no_grad():
    for x, y in loader:
        correct += mw.sum((model(x).argmax(1) == y).sum().item())  # wrong
        # right: correct += (model(x).argmax(1) == y).sum().item()
accuracy = mw.sum(correct) / len(labels)
mw.print(f"accuracy {accuracy:.4f}")
