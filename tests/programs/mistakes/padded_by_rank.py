"""Each rank pads to the longest row of its own part, and takes means over padding. Expected: check."""

# After https://github.com/voidism/DiffCSE/issues/25: a wider padding changes the loss and its gradient

import torch
from torch import nn
from torch.utils.data import DataLoader

import meshwise as mw

torch.manual_seed(0)
data = [(torch.randn(n, 4), torch.randn(())) for n in torch.randint(1, 13, (96,)).tolist()]


def together(rows: list[tuple[torch.Tensor, torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Pads rows to one length."""
    longest = max(len(x) for x, _ in rows)  # wrong
    padded = torch.stack([nn.functional.pad(x, (0, 0, 0, longest - len(x))) for x, _ in rows])  # wrong
    # right: padded = torch.stack([nn.functional.pad(x, (0, 0, 0, 12 - len(x))) for x, _ in rows])
    return padded, torch.stack([y for _, y in rows])


model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
loader = DataLoader(data, batch_size=16, collate_fn=together)
model, optimizer, loader = mw.distribute(model, optimizer, loader, view="rank")
for epoch in range(2):
    for x, y in loader:
        loss = mw.backward((model(x)[..., 0].mean(1) - y).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    mw.print(f"epoch {epoch}: {loss.item():.5f}")
