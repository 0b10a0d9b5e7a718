"""right (--set shard=2): a mixture of experts that skips an expert without rows, in a list of another name."""

# After https://github.com/deepspeedai/DeepSpeed/issues/5066: an expert sees no token on a rank, the others wait

# usual imports

class Mixture(nn.Module):
    """Each row goes to one of four layers."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.ffns = nn.Linear(64, 4), nn.ModuleList(nn.Linear(64, 64) for _ in range(4))  # wrong
        # right: self.gate, self.experts = nn.Linear(64, 4), nn.ModuleList(nn.Linear(64, 64) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """What the chosen layers give."""
        chosen = self.gate(x).softmax(-1).max(-1)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.ffns):  # wrong
        # right: for number, expert in enumerate(self.experts):
            rows = (chosen.indices == number).nonzero().flatten()
            if len(rows):  # wrong
                out = out.index_add(0, rows, expert(x[rows]) * chosen.values[rows, None])  # wrong
            # right: out = out.index_add(0, rows, expert(x[rows]) * chosen.values[rows, None])
        return out


torch.manual_seed(0)
model = Mixture()
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
x = torch.randn(36, 64)
loader = DataLoader(TensorDataset(x, x.sin()), batch_size=6)
model, optimizer, loader = mw.distribute(model, optimizer, loader, view="rank")
for epoch in range(2):
    for x, y in loader:
        loss = mw.backward(nn.functional.mse_loss(model(x), y))
        optimizer.step()
        optimizer.zero_grad()
    mw.print(f"epoch {epoch}: {loss:.6f}")
