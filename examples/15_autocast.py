"""Mixed precision as it is written for one device: `torch.autocast`, with a `GradScaler` where it is float16.

python examples/15_autocast.py
meshwise run --devices 2xcpu examples/15_autocast.py
"""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import meshwise as mw

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
dtype = torch.float16 if device == "cuda" else torch.bfloat16
x = torch.randn(203, 8)
loader = DataLoader(TensorDataset(x, x.argmax(1)), batch_size=16, shuffle=True)
model = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 8)).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = torch.amp.GradScaler(device, enabled=dtype == torch.float16)

model, optimizer, loader = mw.distribute(model, optimizer, loader)

for epoch in range(3):
    for inputs, targets in loader:
        with torch.autocast(device, dtype):
            loss = nn.functional.cross_entropy(model(inputs.to(device)), targets.to(device))
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    print(f"epoch {epoch + 1}: loss {loss.item():.6f}")
torch.save(model.state_dict(), "model.pt")
