"""A contrastive loss has the negatives of this rank's part alone. Expected: refused, said, check."""

# After https://github.com/facebookresearch/simsiam/issues/20

# usual imports
torch.manual_seed(0)
X = torch.randn(96, 8)
model = nn.Linear(8, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
loader = DataLoader(TensorDataset(X, X + 0.1 * torch.randn_like(X)), batch_size=16)
model, optimizer, loader = mw.distribute(model, optimizer, loader, view="rank")
for epoch in range(2):
    for a, b in loader:
        logits = nn.functional.normalize(model(a)) @ nn.functional.normalize(model(b)).T  # wrong
        loss = mw.backward(nn.functional.cross_entropy(logits, torch.arange(len(a))))  # wrong
        # right: loss = mw.backward(-nn.functional.cosine_similarity(model(a), model(b).detach()).mean())
        optimizer.step()
        optimizer.zero_grad()
    mw.print(f"epoch {epoch}: {loss.item():.5f}")
