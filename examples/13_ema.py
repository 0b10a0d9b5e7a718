"""An average of the weights (EMA) that is updated after each step and evaluated: give it to `mw.distribute` too.

python examples/13_ema.py
meshwise run --set shard=2 examples/13_ema.py    the model and its average divided over two: the same numbers
"""

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, TensorDataset

import meshwise as mw

torch.manual_seed(0)
x = torch.randn(303, 8)
data = TensorDataset(x, x.argmax(1))
train, test = DataLoader(data, batch_size=32, shuffle=True), DataLoader(data, batch_size=100)
model = nn.Sequential(nn.Linear(8, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 8))
ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

model, ema, optimizer, train, test = mw.distribute(model, ema, optimizer, train, test)

for epoch in range(3):
    model.train()
    for inputs, targets in train:
        nn.functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
        ema.update_parameters(model)
    ema.eval()
    total = 0.0
    for inputs, targets in test:
        with torch.no_grad():
            total += nn.functional.cross_entropy(ema(inputs), targets, reduction="sum").item()
    print(f"epoch {epoch + 1}: loss of the average {total / len(data):.6f}")
torch.save(ema.module.state_dict(), "model.pt")
