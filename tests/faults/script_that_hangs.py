"""A loop of one's own; `silent` on all ranks for a while after its second epoch, or `late` on rank 1 in step 20, or
with rank 0 `alone` in a forward after its second epoch."""

import sys
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import meshwise as mw

what, seconds = sys.argv[1], float(sys.argv[2])
torch.manual_seed(0)
x = torch.randn(400, 4)
model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)) if what == "alone" else nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
model, optimizer, loader = mw.distribute(model, optimizer, DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), 8))


def validate() -> None:
    time.sleep(seconds)


for epoch in range(4):
    for step, (inputs, targets) in enumerate(loader, start=1):
        if what == "late" and epoch == 0 and step == 20 and mw.rank() == 1:
            validate()
        mw.backward(nn.functional.mse_loss(model(inputs), targets))
        optimizer.step()
        optimizer.zero_grad()
    if what == "silent" and epoch == 1:
        validate()
    if what == "alone" and epoch == 1 and mw.is_main():
        model(x[:24])
print("the end")
