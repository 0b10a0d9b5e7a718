"""Both backwards of a window are in mw.accumulate, and its gradients are clipped before the step. Expected: right."""

# After https://github.com/huggingface/diffusers/pull/721: gradients are clipped before they are synchronised
# right:
# right: import contextlib

# usual imports and rows
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
loader = DataLoader(TensorDataset(X, Y), batch_size=16)
model, optimizer, loader = mw.distribute(model, optimizer, loader, view="rank")
for number, (x, y) in enumerate(loader, 1):
    with mw.accumulate():  # wrong
    # right: with mw.accumulate() if number % 2 else contextlib.nullcontext():
        loss = mw.backward((model(x) - y).square().mean() / 2)
    if number % 2 == 0:
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
        mw.print(f"step {number // 2}: loss {loss.item():.5f} norm {norm.item():.5f}")
