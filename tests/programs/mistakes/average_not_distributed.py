"""refused (--set shard=2): an average of parameters and buffers that mw.distribute is not given."""

# After https://github.com/NCAR/miles-credit/issues/414: an average would mix DTensor shards with plain tensors

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, TensorDataset

import meshwise as mw

torch.manual_seed(0)
x = torch.randn(64, 8)
model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 8))
average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(TensorDataset(x, x.sin()), batch_size=16)
model, optimizer, loader = mw.distribute(model, optimizer, loader, view="rank")  # wrong
# right: model, average, optimizer, loader = mw.distribute(model, average, optimizer, loader, view="rank")
for epoch in range(2):
    for x, y in loader:
        loss = mw.backward(nn.functional.mse_loss(model(x), y))
        optimizer.step()
        optimizer.zero_grad()
        average.update_parameters(model)
    mw.print(f"epoch {epoch}: {loss:.6f} {average.module[0].weight.norm().item():.6f}")
