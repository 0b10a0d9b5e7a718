"""The batch of each rank is computed two lines before the loader, from the environment. Expected: said."""

# After https://github.com/pytorch/ignite/issues/3234: a batch of each rank for a loader that takes that of all

import os

# usual imports

def main() -> None:
    torch.manual_seed(0)
    X = torch.randn(128, 4)
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    batch = 32
    per_rank = batch // world_size
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(TensorDataset(X, X.sum(1, keepdim=True)), per_rank, shuffle=True)  # wrong
    # right: loader = DataLoader(TensorDataset(X, X.sum(1, keepdim=True)), batch, shuffle=True)
    model, optimizer, loader = mw.distribute(model, optimizer, loader, view="rank")
    for x, target in loader:
        loss = mw.backward((model(x) - target).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    mw.print(f"{len(loader)} steps, loss {loss.item():.6f}")  # wrong
    # right: mw.print(f"{per_rank * world_size} samples a step, {len(loader)} steps, loss {loss.item():.6f}")


main()
