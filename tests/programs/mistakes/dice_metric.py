"""A Dice score of the test set as the mean of the ranks' ratios, in one line. Expected: check."""

# After https://github.com/allenai/allennlp/issues/4347: any metric is averaged over GPUs, ratios too

# usual imports
torch.manual_seed(0)
X = torch.randn(96, 1, 8, 8)
masks = (X.cumsum(2) + 0.5 * torch.randn_like(X) > 1).float()
model = nn.Conv2d(1, 1, 3, padding=1)
loader = DataLoader(TensorDataset(X, masks), batch_size=16)
model, loader = mw.distribute(model, loader, view="rank")
model.eval()
scores = []
with torch.no_grad():
    for x, y in loader:
        p = model(x).sigmoid()
        scores.append(mw.mean(2 * (p * y).sum() / (p + y).sum()).item())  # wrong
        # right: scores.append((2 * mw.sum((p * y).sum()) / mw.sum((p + y).sum())).item())
mw.print(f"dice {sum(scores) / len(scores):.6f}")
