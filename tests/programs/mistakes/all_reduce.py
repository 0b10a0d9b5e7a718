"""`mw.all_reduce` of one tensor, as torch.distributed has it: it added up the elements. Expected: refused."""

# After https://github.com/huggingface/accelerate/issues/1266: accelerator.reduce on one GPU adds up the elements

# usual imports
torch.manual_seed(0)
X = torch.randn(64, 4)
labels = (X.sum(1) > 0).long()
model = nn.Linear(4, 2)
loader = DataLoader(TensorDataset(X, labels), batch_size=16)
model, loader = mw.distribute(model, loader, view="rank")
counts = torch.zeros(2)
with torch.no_grad():
    for x, _ in loader:
        counts += torch.bincount(model(x).argmax(1), minlength=2)
mw.all_reduce(counts)  # wrong
# right: counts = mw.sum(counts)
mw.print(f"predicted {counts.tolist()}")
