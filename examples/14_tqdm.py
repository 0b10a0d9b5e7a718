"""A progress bar over a loader: one bar, of rank 0, with the loss of the whole batch.

python examples/14_tqdm.py
meshwise run --devices 2xcpu examples/14_tqdm.py
"""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from tqdm import tqdm

import meshwise as mw

torch.manual_seed(0)
x = torch.randn(203, 8)
loader = DataLoader(TensorDataset(x, x.argmax(1)), batch_size=16, shuffle=True)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

model, optimizer, loader = mw.distribute(model, optimizer, loader)

for epoch in range(2):
    with tqdm(loader, desc=f"epoch {epoch + 1}") as bar:
        for inputs, targets in bar:
            loss = nn.functional.cross_entropy(model(inputs), targets)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            bar.set_postfix(loss=f"{loss.item():.4f}")
    print(f"epoch {epoch + 1}: loss {loss.item():.6f}")
torch.save(model.state_dict(), "model.pt")
