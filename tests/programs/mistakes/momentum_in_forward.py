"""refused (--set shard=2): the forward writes a running average of its parameters in place (BYOL, MoCo)."""

# After https://github.com/pytorch/pytorch/issues/117742: an average written into FSDP's shards does not persist

# usual imports

class Momentum(nn.Module):
    """A network beside its running average."""

    def __init__(self) -> None:
        super().__init__()
        self.online, self.target = nn.Linear(6, 9), nn.Linear(6, 9).requires_grad_(False)

    def average(self) -> None:
        """Make it anew."""
        with torch.no_grad():
            for p, q in zip(self.target.parameters(), self.online.parameters(), strict=True):
                p.lerp_(q, 0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """How far both are apart."""
        self.average()  # wrong
        return (self.online(x) - self.target(x)).square().mean()


torch.manual_seed(0)
model = Momentum()
optimizer = torch.optim.SGD(model.online.parameters(), lr=0.1)
loader = DataLoader(TensorDataset(torch.randn(64, 6)), batch_size=16)
model, optimizer, loader = mw.distribute(model, optimizer, loader, view="rank")
for epoch in range(2):
    for (x,) in loader:
        loss = mw.backward(model(x))
        optimizer.step()
        optimizer.zero_grad()
        # right: model.average()
    mw.print(f"epoch {epoch}: {loss:.6f} {model.target.weight.norm().item():.6f}")
