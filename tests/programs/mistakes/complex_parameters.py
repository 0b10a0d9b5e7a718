"""Complex parameters train on several devices (a first gradient was conjugated) and in checks. Expected: right."""

# After https://github.com/pytorch/pytorch/issues/158753: DDP loses the imaginary part of gradients

# usual imports

class Rotation(nn.Module):
    """Multiplies by complex numbers."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 8, dtype=torch.complex64) * 0.3)  # wrong
        # right: self.weight = nn.Parameter(torch.view_as_real(torch.randn(4, 8, dtype=torch.complex64) * 0.3).clone())
        self.out = nn.Linear(16, 2)

    def forward(self, x):
        z = x.to(torch.complex64) @ self.weight  # wrong
        # right: z = x.to(torch.complex64) @ torch.view_as_complex(self.weight)
        return self.out(torch.cat([z.real, z.imag], 1).tanh())


torch.manual_seed(0)
X = torch.randn(128, 4)
Y = (X[:, 0] * X[:, 1] > 0).long()
model = Rotation()
optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
loader = DataLoader(TensorDataset(X, Y), batch_size=16)
model, optimizer, loader = mw.distribute(model, optimizer, loader, view="rank")
for epoch in range(3):
    for x, y in loader:
        loss = mw.backward(nn.functional.cross_entropy(model(x), y))
        optimizer.step()
        optimizer.zero_grad()
    mw.print(f"epoch {epoch}: {loss:.6f}")
